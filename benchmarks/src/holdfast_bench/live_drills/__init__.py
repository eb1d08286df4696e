"""Drills: faults that are injected into a run, and checks of the invariants after each.

A module belongs here if only `holdfast drill` needs it. It acts on a run from outside, as a machine
or a person would.

`kinds` says what each fault does and what should follow, `faults` injects faults from outside,
`invariants` and `process_list` check, and `runner` makes one fault after another on one run, with
the checks after each.
"""
