"""Adapters: each connects one training framework to Holdfast. A program imports only its own.

An adapter module has the name of its framework. `versions.py` has the tested versions.
"""
