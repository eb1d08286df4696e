"""Drills: rehearsed faults against a run, and the invariants that must hold after each."""
