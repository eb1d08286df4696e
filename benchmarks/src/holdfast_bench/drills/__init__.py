"""Drills on temporary runs: their testbeds, their faults, and the report."""
