"""The process of a rank: its signals, its children, its devices, and what runs beside it.

A module belongs here if it concerns the process, not its training.
"""
