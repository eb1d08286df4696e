"""Which samples a step trains on, at every count of ranks alike."""
