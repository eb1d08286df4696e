"""Interruption notices of clouds: which node will be taken away, and when.

One module per cloud. Each asks the metadata service of its cloud and returns a `Notice`; what an
attempt does about it is decided in `stops`.
"""
