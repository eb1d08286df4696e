"""Why and when an attempt stops, saves early or leaves nodes: signals, notices and the agreement.

A module belongs here if it is a source of a stop request or carries one to the ranks.
"""
