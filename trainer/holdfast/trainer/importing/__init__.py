"""Imports: weights of other programs become the first checkpoint of a run."""
