"""How the ranks of a program reach each other and the agent, and what a rank knows of itself.

A module belongs here if it sends messages between ranks or identifies one.
"""
