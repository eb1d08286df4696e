"""A run's log files: which there are, parts of them without secrets, and a search in them.

Requests that read other files of a run do not belong here.
"""
