"""Interruption notices of clouds: who announces that a node will be taken away, and when."""
