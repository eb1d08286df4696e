"""From a run's folder to the rows of the index.

A module belongs here if it reads journals and manifests, or builds and writes rows. It answers no
queries.
"""
