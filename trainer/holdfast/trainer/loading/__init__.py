"""Loading of checkpoints into a state, by exact byte ranges that are checked as they are read.

A module belongs here if it chooses a checkpoint or reads its bytes into memory. File formats are in
`format`, other programs' weights in `sources`.
"""
