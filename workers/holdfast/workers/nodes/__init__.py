"""What Holdfast knows of a node and its processes: heartbeats, GPUs, the root as it sees it.

A module belongs here if it describes or measures a machine rather than an attempt.
"""
