"""`Session`, and what it does at each step of a loop.

A module belongs here if it is part of a session's steps: settings, the loop's protocol, metrics.
What is saved is in `state`, how it is saved in `saving` and `staging`.
"""
