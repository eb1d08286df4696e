"""Definitions that all parts of Holdfast share: specs, files, states, events and shared memory.

This package uses only the standard library, pydantic and xxhash, and imports no other part of
Holdfast.
"""
