"""What happens to a run from its creation to its deletion, outside of its nodes.

A module belongs here if it creates, submits, observes or steers runs and attempts. It writes the
journal before it acts. What it decides comes from `decisions`; it reaches jobs by `schedulers`.
"""
