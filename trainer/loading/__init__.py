"""From a checkpoint's bytes into a state: by exact ranges, checked while they are read."""
