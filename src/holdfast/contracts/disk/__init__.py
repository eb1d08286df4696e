"""The files of a run: their names, their formats, and how they are written and read safely.

A module belongs here if it knows bytes, paths or locks of one file or folder: the journal, the
manifest, durable writes, leases, damage. What several files say together belongs in `records`.
"""
