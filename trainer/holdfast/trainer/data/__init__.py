"""The samples of each training step, the same at every rank count.

A module belongs here if it decides which samples a rank gets. How a framework's loader is wrapped
belongs in `frameworks`.
"""
