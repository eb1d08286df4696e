"""The SQL index of runs. It is built from disk, and the CLI and the API query it.

The index is not a source of truth: a run's folder is. `ingest_run` updates the rows of one run
from its folder, `reindex` rebuilds the rows of a whole root, and `queries` reads the rows.
"""
