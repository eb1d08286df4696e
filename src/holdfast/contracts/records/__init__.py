"""What a run's files say together: its attempts, states, orders and history.

A module belongs here if it turns journal lines and JSON documents into facts that decisions, the
index and the command use. How the files are written belongs in `disk`.
"""
