"""What ranks and GPUs did over time: the answers about the series that an attempt's nodes keep.

Requests about their current state do not belong here, see `vitals`.
"""
