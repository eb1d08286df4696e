"""From a run's folder to the rows of the index. Nothing here answers a question.

A module belongs here if it reads journals and manifests and builds or writes rows.
"""
