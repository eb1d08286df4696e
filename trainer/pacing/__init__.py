"""When to save and when to keep a snapshot, from what both cost."""
