"""What a run's time was spent on, and what it cost. Pure functions of journal lines.

A module belongs here if it adds up seconds, steps or money. It reads no files.
"""
