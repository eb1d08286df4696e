"""What happens to a run from its creation to its deletion, outside of its nodes.

A module belongs here if it creates, submits, observes or steers runs and attempts. It writes to
the journal before it acts, takes decisions from `decisions`, and reaches jobs through `schedulers`.
"""
