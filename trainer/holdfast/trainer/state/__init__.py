"""The state that a checkpoint saves: canonical names, optimizers, objects, random numbers.

A module belongs here if it captures or restores a part of the program's state. Bytes and files are
the work of `planning`, `format` and `loading`.
"""
