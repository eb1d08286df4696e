"""Imports: weights of other programs become the first checkpoint of a run.

A module belongs here if it writes the imported checkpoint. Reading the weights is the work of
`sources`.
"""
