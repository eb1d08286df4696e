"""The index as long-lived processes use it: opened when needed, and again after it was away.

A SQLite file that turns out to be damaged is replaced by a new one, whose rows come from disk.
"""

from __future__ import annotations

import os
import threading

from holdfast.contracts.errors import DamagedIndexError, LineageError
from holdfast.contracts.paths import RunPaths
from holdfast.lineage.database import Database, open_database, replace_damaged
from holdfast.lineage.ingest import ingest_run


class Index:
    """The database, opened when it is first needed and again after it was away.

    Safe for several threads. A connection to a file that was removed or replaced is not used
    again: what is written there nobody reads. `files` counts the files that it has used: where it
    grows, rows that were in the former one must be brought back from disk.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._database: Database | None = None
        self._file: tuple[int, int] | None = None
        self.files = 0

    def open(self) -> Database:
        """The database. Raises `LineageError` with what to do when it cannot be used."""
        with self._lock:
            if self._database is not None and self._database.is_damaged:
                self._replace_file()
            if self._database is not None and _file_of(self._database) != self._file:
                self.close()
            if self._database is None:
                self._database = open_database()
                file = _file_of(self._database)
                self.files += file != self._file
                self._file = file
            return self._database

    def update(self, paths: RunPaths) -> None:
        """Bring one run's rows in line with its folder. Raises `LineageError`.

        A connection that failed is not used again; a damaged file is replaced at once.
        """
        try:
            try:
                ingest_run(self.open(), paths)
            except DamagedIndexError:
                ingest_run(self.open(), paths)
        except LineageError:
            self.close()
            raise

    def close(self) -> None:
        """Give the connections back."""
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _replace_file(self) -> None:
        assert self._database is not None
        url = self._database.engine.url
        self.close()
        replace_damaged(url)

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file_of(database: Database) -> tuple[int, int] | None:
    """Device and number of the file at the place of an SQLite database; None without one."""
    place = database.engine.url.database
    if database.is_postgresql or not place:
        return None
    try:
        facts = os.stat(place)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
