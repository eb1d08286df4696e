"""When to save and when to take a snapshot, from the cost of both."""
