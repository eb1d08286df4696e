"""How the agent knows what its ranks do: heartbeats, hangs, stacks, and a program's output.

A module belongs here if it observes ranks or judges what was observed. It never ends a process.
"""
