"""Weights that other programs saved: which tensors there are, and where their bytes lie.

One module per format. A source is opened as a hostile file: nothing in it is run.
"""
