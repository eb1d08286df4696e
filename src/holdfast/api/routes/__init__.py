"""The routes of the server, one module per subject.

A route checks its parameters, asks the store or calls an action of `workers`, and returns a model
of `schemas`. It decides nothing and reads no file itself.
"""
