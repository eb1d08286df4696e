"""Staging slots: memory that outlives a rank, and the table that says what a slot holds.

The ranks write them (`staging`), the flusher reads them. Neither torch nor a plan is needed here.
"""
