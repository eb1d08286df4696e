"""Copies of checkpoints in a directory or an object store, made while training continues.

A module belongs here if it knows a store or moves files to and from it. It knows no tensors.
"""
