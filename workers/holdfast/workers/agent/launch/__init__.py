"""One launch of torchrun on one node: its command, its warm standby and its flusher.

A module belongs here if it starts or ends a process of an attempt.
"""
