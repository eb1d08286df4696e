"""Reindex: rebuilds all rows of a root from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from sqlalchemy import select

from holdfast.contracts.disk import roots, visits
from holdfast.contracts.disk.paths import RunPaths, list_runs
from holdfast.contracts.errors import LineageError, NotFoundError
from holdfast.lineage.database.tables import RUNS
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.ingest.run_ingest import forget_run, ingest_run

# More threads would wait for each other, because most of the work is in Python.
RUNS_AT_ONCE: Final = 2


class ReindexReport(BaseModel):
    """The result of a reindex, by folder name: rebuilt, failed with the reason, and removed."""

    root: str
    runs: list[str] = []
    failed: dict[str, str] = {}
    removed: list[str] = []

    @property
    def ok(self) -> bool:
        """True if every run of the root could be read."""
        return not self.failed


def reindex(
    database: Database, root: Path, progress: Callable[[str], None] | None = None
) -> ReindexReport:
    """Rebuild the rows of every run under `root`, and delete those of runs that no longer exist.

    A run that cannot be read is reported and keeps its rows, and so does one whose folder only
    other accounts may enter. `progress` is called with the name of each folder when it is done.
    Raises `NotFoundError` if `root` is not a folder, and `LineageError` if the database cannot be
    used.
    """
    root = root.expanduser().resolve()
    if not root.is_dir():
        raise NotFoundError(f"{root}: no such folder; expected the root that contains the runs")
    report = ReindexReport(root=str(root))
    found = list_runs(root)
    for paths, failure in zip(found, _ingest_all(database, found), strict=True):
        if failure:
            report.failed[paths.name] = failure
        else:
            report.runs.append(paths.name)
        if progress:
            progress(paths.name)
    report.removed = _forget_missing(database, root, {paths.name for paths in found})
    return report


def _forget_missing(database: Database, root: Path, there: set[str]) -> list[str]:
    """Delete the rows of the root's runs that are not `there`, and return their folders' names."""
    # A root of another cluster can have the same path.
    is_this = (RUNS.c.root == str(root)) & (RUNS.c.root_id == roots.read_root_id(root))
    with database.reading() as connection:
        stored = connection.execute(select(RUNS.c.uid, RUNS.c.run).where(is_this)).all()
    # This account may be unable to read a run that exists. Its rows must stay, see decision 93.
    missing = [(uid, run) for uid, run in stored if run not in there and not _hides(root / run)]
    for uid, _ in missing:
        forget_run(database, uid)
    return [run for _, run in missing]


def _hides(folder: Path) -> bool:
    """Return True if this account cannot tell whether the folder contains a run."""
    try:
        RunPaths(folder).spec.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return False


def _ingest_all(database: Database, found: Sequence[RunPaths]) -> Iterator[str]:
    """Ingest each run; yield in turn the reason why it failed, or an empty text."""

    def ingest(paths: RunPaths) -> str:
        # `LineageError` alone ends the work: without a database, no further run can be written.
        (one,) = visits.visit(
            [paths], partial(ingest_run, database, fresh=True), raises=(LineageError,)
        )
        return f"{type(one.error).__name__}: {one.error}" if one.error is not None else ""

    if not database.is_postgresql:
        # SQLite allows one writer at a time.
        yield from map(ingest, found)
        return
    # While PostgreSQL writes the rows of one run, read the folder of another.
    with ThreadPoolExecutor(RUNS_AT_ONCE, thread_name_prefix="reindex") as pool:
        try:
            yield from pool.map(ingest, found)
        finally:
            pool.shutdown(cancel_futures=True)
