"""Loading of checkpoints into a state, by exact byte ranges that are checked while read."""
