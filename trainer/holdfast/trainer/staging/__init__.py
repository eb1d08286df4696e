"""Copies of a rank's state into its staging slot, at memory speed.

A module belongs here if it runs between the decision to save and the seal of the slot. The slots
themselves are in `slots`; what writes them to disk is in `flusher`.
"""
