"""Weights that other programs saved: which tensors there are, and where their bytes lie."""
