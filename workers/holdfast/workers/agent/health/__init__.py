"""Checks of a node before and between launches, and node 0's judgement of their results.

A module belongs here if it decides whether a node can train, before any rank runs on it.
"""
