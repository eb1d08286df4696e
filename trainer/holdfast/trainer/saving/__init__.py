"""The saves of a session: what is due, the engine that saves it, and where it goes.

A module belongs here if it coordinates a save. Copies into memory belong in `staging`, plans in
`planning`, writing in `flusher`.
"""
