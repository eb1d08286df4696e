"""Staging slots: memory or files that outlive a rank, and the table that says what a slot holds.

The ranks write slots (`staging`) and the flusher reads them. No module here imports torch or knows
a save plan.
"""
