"""Interruption notices of clouds: which node will be taken away, and when."""
