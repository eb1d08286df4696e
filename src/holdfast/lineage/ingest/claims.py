"""The check for copied run folders: two folders with the same uid."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from holdfast.contracts.disk.paths import RunPaths, precedence
from holdfast.contracts.errors import HoldfastError, UnreadableRunError
from holdfast.contracts.records.attempt import RunRecord, read_document
from holdfast.lineage.database.tables import RUNS
from holdfast.lineage.database.transactions import Database


def check_uid(database: Database, paths: RunPaths, uid: str) -> None:
    """Raise `UnreadableRunError` if another folder with the same uid has precedence.

    The rows belong to the folder that is first by `contracts.paths.precedence`. A folder that was
    moved causes no error, because its old path no longer exists.
    """
    with database.reading() as connection:
        known = connection.scalar(select(RUNS.c.directory).where(RUNS.c.uid == uid))
    if known is None or known == str(paths.directory):
        return
    rival = RunPaths(Path(known))
    try:
        record = read_document(RunRecord, rival.spec)
        if record is None or record.uid != uid or precedence(paths) < precedence(rival):
            return
    except (HoldfastError, OSError):
        return
    raise UnreadableRunError(
        f"{paths.directory}: has the same uid as the run in {rival.directory} ({uid}); move the "
        "copy out of the root"
    )
