"""Reindex: all rows of a root built again from disk alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from sqlalchemy import select

from holdfast.contracts.errors import HoldfastError, LineageError, NotFoundError
from holdfast.contracts.paths import RunPaths, list_runs
from holdfast.contracts.roots import read_root_id
from holdfast.lineage.database import Database
from holdfast.lineage.ingest import forget_run, ingest_run
from holdfast.lineage.tables import RUNS

# More of them wait for each other: most of the work is Python's.
RUNS_AT_ONCE: Final = 2


class ReindexReport(BaseModel):
    """What a reindex did, by folders' names: read again, not readable and why, gone from disk."""

    root: str
    runs: list[str] = []
    failed: dict[str, str] = {}
    removed: list[str] = []

    @property
    def ok(self) -> bool:
        """True when every run of the root could be read."""
        return not self.failed


def reindex(
    database: Database, root: Path, progress: Callable[[str], None] | None = None
) -> ReindexReport:
    """Build the rows of every run under `root` again, and drop those of runs that are gone.

    A run that cannot be read is reported and its rows stay as they are; the others go on.
    `progress` is told each folder's name when it is done. Raises `NotFoundError` when there is
    no such folder, `LineageError` when the database cannot be used.
    """
    root = root.expanduser().resolve()
    if not root.is_dir():
        raise NotFoundError(f"{root}: no such folder; give the root that holds the runs' folders")
    report = ReindexReport(root=str(root))
    found = list_runs(root)
    for paths, failure in zip(found, _ingest_all(database, found), strict=True):
        if failure:
            report.failed[paths.name] = failure
        else:
            report.runs.append(paths.name)
        if progress:
            progress(paths.name)
    with database.reading() as connection:
        # Another cluster's root may have the same path.
        is_this = (RUNS.c.root == str(root)) & (RUNS.c.root_id == read_root_id(root))
        stored = connection.execute(select(RUNS.c.uid, RUNS.c.run).where(is_this))
        known = {str(uid): str(run) for uid, run in stored}
    there = {paths.name for paths in found}
    for uid, run in known.items():
        if run not in there:
            forget_run(database, uid)
            report.removed.append(run)
    return report


def _ingest_all(database: Database, found: Sequence[RunPaths]) -> Iterator[str]:
    """Read each run again; gives in turn why it could not be read, empty when it was."""
    if not database.is_postgresql:
        # SQLite lets one in at a time.
        yield from (_ingest(database, paths) for paths in found)
        return
    # While the server works on the rows of one run, the folder of another is read.
    with ThreadPoolExecutor(RUNS_AT_ONCE, thread_name_prefix="reindex") as pool:
        try:
            yield from pool.map(lambda paths: _ingest(database, paths), found)
        finally:
            pool.shutdown(cancel_futures=True)


def _ingest(database: Database, paths: RunPaths) -> str:
    """Read one run again; returns why it could not be read, empty when it was."""
    try:
        ingest_run(database, paths, fresh=True)
    except LineageError:
        raise
    except (HoldfastError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
