"""Weights that other programs saved: which tensors there are, and where their bytes lie.

One module per format. A source is treated as hostile: no code in it runs.
"""
