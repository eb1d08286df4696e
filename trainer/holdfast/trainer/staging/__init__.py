"""Memory slots with a rank's checkpoint files, and the copies into them."""
