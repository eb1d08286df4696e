"""When to save and when to take a snapshot, from the cost of both.

A module belongs here if it turns measured seconds into an interval. Making the save is the work of
`saving`.
"""
