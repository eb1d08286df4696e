"""Memory slots that hold a rank's files, and the copies into them."""
