"""The index of runs as a flow uses it: wanted at the start of a run, done without after it."""

from __future__ import annotations

from holdfast.contracts.errors import LineageError
from holdfast.contracts.paths import RunPaths
from holdfast.lineage.database import Database, open_database
from holdfast.lineage.ingest import ingest_run


class Index:
    """The database, opened when it is first needed and again after it was away."""

    def __init__(self) -> None:
        self._database: Database | None = None

    def open(self) -> Database:
        """The database. Raises `LineageError` with what to do when it cannot be used."""
        if self._database is None:
            self._database = open_database()
        return self._database

    def update(self, paths: RunPaths) -> None:
        """Bring one run's rows in line with its folder. Raises `LineageError`.

        A connection that failed is not used again: the file behind it may be another by then.
        """
        try:
            ingest_run(self.open(), paths)
        except LineageError:
            self.close()
            raise

    def close(self) -> None:
        """Give the connections back."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
