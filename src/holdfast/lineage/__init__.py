"""The index of runs in SQL: built from disk, rebuilt from disk, asked by the command and the API.

Nothing here is the truth. What a run is stands in its folder; `ingest_run` brings the rows of
one run in line with it, `reindex` does so for a whole root, and `queries` answers from the rows.
"""
