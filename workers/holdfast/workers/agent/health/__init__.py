"""Checks of a node before and between launches, and node 0's judgement of their results."""
