"""Why and when an attempt stops or saves early: signals, notices, limits and the agreement.

A module belongs here if it is a source of a stop request or carries one to the ranks.
"""
