"""Detection of losses that are not finite or far too high, and the decision about them."""
