"""The index for long-lived processes: it reconnects, and it replaces a damaged SQLite file.

sqlalchemy is loaded at the first use, so that a supervisor submits its first job before that.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import DamagedIndexError, LineageError

if TYPE_CHECKING:
    from holdfast.lineage.database.transactions import Database
    from holdfast.lineage.ingest.following import IndexProgress


class Index:
    """The database, opened on first use and again after a failure. Thread-safe.

    A connection to a deleted or replaced file is not used again, because its writes would be
    lost. `files` counts the files that were used. When it increases, the rows of the old file
    must be rebuilt from disk.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._database: Database | None = None
        self._file: tuple[int, int] | None = None
        self._progress: dict[Path, IndexProgress] = {}
        self.files = 0

    def open(self) -> Database:
        """Return the open database. Raises `LineageError` if it cannot be used."""
        from holdfast.lineage.database.transactions import open_database

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
        """Update the rows of one run from its folder. Raises `LineageError`.

        What was seen of a live run is remembered, so that the next update costs as much as what is
        new. A damaged file is replaced directly. After another failure, the connection is closed.
        """
        from holdfast.lineage.ingest.following import IndexProgress
        from holdfast.lineage.ingest.run_ingest import ingest_run

        progress = self._progress.setdefault(paths.directory, IndexProgress())
        try:
            with progress.lock:
                try:
                    ingest_run(self.open(), paths, progress=progress)
                except DamagedIndexError:
                    ingest_run(self.open(), paths, progress=progress)
                if progress.state is None:
                    self._progress.pop(paths.directory, None)
        except LineageError:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _replace_file(self) -> None:
        from holdfast.lineage.database.transactions import replace_damaged

        assert self._database is not None
        url = self._database.engine.url
        self.close()
        replace_damaged(url)

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file_of(database: Database) -> tuple[int, int] | None:
    """Return the device and inode of the SQLite file, or None if there is none."""
    path = database.engine.url.database
    if database.is_postgresql or not path:
        return None
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
