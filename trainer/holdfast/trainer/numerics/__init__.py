"""Detection of losses that are not finite or far too high, and the decision about them.

A module belongs here if it judges a loss. What is restored after a rollback is chosen in `loading`.
"""
