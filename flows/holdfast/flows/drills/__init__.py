"""Drills: faults that are injected into a run, and checks of the invariants after each."""
