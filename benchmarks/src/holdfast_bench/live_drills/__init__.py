"""Drills: faults that are injected into a run, and checks of the invariants after each.

A module belongs here if only `holdfast drill` needs it. It acts on a run from outside, as a machine
or a person would.
"""
