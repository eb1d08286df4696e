"""Which run or checkpoint is meant, and the index brought up to date with disk before it answers.

Rows are never trusted over folders: what is asked about is first reconciled with the scheduler
and ingested, so an answer is right also when every flow has long been killed.
"""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.output import warn
from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.bounds import MADE_UID, UID
from holdfast.contracts.errors import (
    HoldfastError,
    LineageError,
    NotFoundError,
)
from holdfast.contracts.history import RunHistory, load_history
from holdfast.contracts.paths import (
    LATEST,
    CheckpointName,
    RunPaths,
    default_root,
    has_spec,
    list_runs,
    precedence,
)
from holdfast.contracts.reading import is_mine, read_bounded
from holdfast.contracts.secrets import known_secrets

# SQLAlchemy and submitit take most of a second to import: only the commands that use them pay.
if TYPE_CHECKING:
    from holdfast.lineage.database import Database

WRITER = "cli"


def choose_root(root: str | None) -> Path:
    """The root given, else the default one; absolute."""
    return Path(root).expanduser().absolute() if root else default_root()


def user_name() -> str:
    """Who runs the command, for the records."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def locate_run(name: str, root: str | None, database: Database | None = None) -> RunPaths:
    """The run that a folder's path, a folder's name, a spec's name or a uid means.

    `database` is the index, for a uid, where the caller has it open. Raises `NotFoundError` with
    the names that come near.
    """
    folder = Path(name).expanduser()
    if ("/" in name or folder.is_absolute()) and has_spec(folder):
        return RunPaths(folder.absolute())
    from holdfast.workers.runs import find_run

    home = choose_root(root)
    # No folder named like a uid can stand in for the run that has it.
    if MADE_UID.fullmatch(name) and (found := _find_uid(home, name, database)):
        return found
    try:
        return find_run(home, name)
    except NotFoundError:
        is_uid = UID.fullmatch(name) and not MADE_UID.fullmatch(name)
        if is_uid and (found := _search_uid(home, name)):
            return found
        raise


def _find_uid(home: Path, uid: str, database: Database | None) -> RunPaths | None:
    """The run under `home` with the uid: where the index says, if disk agrees; else by search."""
    from holdfast.lineage import queries

    with contextlib.suppress(LineageError, NotFoundError), contextlib.ExitStack() as stack:
        index = database or stack.enter_context(open_index())
        paths = queries.find_run(index, uid, home).paths
        if paths.directory.parent == home.resolve() and _has_uid(paths, uid):
            return RunPaths(home / paths.name)
    return _search_uid(home, uid)


def _search_uid(home: Path, uid: str) -> RunPaths | None:
    """The run under `home` with the uid; only specs that contain its letters are parsed."""
    found = [paths for paths in list_runs(home) if _has_uid(paths, uid)]
    return min(found, key=precedence, default=None)


def _has_uid(paths: RunPaths, uid: str) -> bool:
    # One folder that cannot be read keeps nobody from naming another.
    with contextlib.suppress(HoldfastError, OSError):
        if uid.encode() in read_bounded(paths.spec, below=paths.directory):
            record = read_document(RunRecord, paths.spec)
            return record is not None and record.uid == uid
    return False


def locate_known(name: str, root: str | None, database: Database) -> RunPaths:
    """Like `locate_run`, and a run of any other root that the index knows.

    Raises `NotFoundError` when neither disk nor index has it.
    """
    from holdfast.lineage import queries

    try:
        return locate_run(name, root, database)
    except NotFoundError:
        if root is not None:
            raise
        with contextlib.suppress(NotFoundError):
            return queries.find_run(database, name).paths
        raise


def locate_checkpoint(text: str, root: str | None) -> tuple[RunPaths, str]:
    """The run and the directory name of a checkpoint, given as its id or its path.

    The directory need not exist: a deleted checkpoint is still spoken of. Raises
    `NotFoundError` when `text` is neither.
    """
    run, colon, name = text.rpartition(":")
    if colon and "/" not in name and CheckpointName.parse(name):
        return locate_run(run, root), name
    path = plain_path(text)
    paths = RunPaths(path.parent.parent)
    if CheckpointName.parse(path.name) and has_spec(paths.directory):
        return paths, path.name
    raise NotFoundError(
        f"{text!r}: not a checkpoint; expected <run>:<step-…> as `holdfast checkpoints RUN` lists "
        "them, or the directory's path"
    )


def plain_path(text: str) -> Path:
    """A path as it was given, absolute; of links, `latest` alone is followed, to its neighbour.

    A link in another user's folder would lead to a run that nobody named.
    """
    path = Path(os.path.abspath(Path(text).expanduser()))
    if path.name == LATEST:
        with contextlib.suppress(OSError):
            target = os.readlink(path)
            return path.with_name(target) if CheckpointName.parse(target) else path
    return path


def refresh(paths: RunPaths, database: Database) -> RunHistory:
    """Reconcile one run with disk and scheduler, ingest it, and return its history."""
    from holdfast.lineage.ingest import ingest_run

    history = look_at(paths)
    ingest_run(database, paths)
    return history


def look_at(paths: RunPaths) -> RunHistory:
    """The run's history, with what disk and scheduler have to add; other processes may be dead.

    What is added is written into the run's journal, so another user's run is only read.
    """
    from holdfast.workers.reconcile import reconcile

    if not is_mine(paths.directory.resolve()):
        return load_history(paths)
    return reconcile(paths, writer=WRITER)


def refresh_newest(home: Path, database: Database, limit: int) -> dict[RunPaths, str]:
    """Refresh the newest runs under `home` until `limit` of them could be read; of the others the
    specs alone are read. Returns those that cannot be read, by name."""
    created: list[tuple[float, str, RunPaths]] = []

    def look(paths: RunPaths) -> None:
        if record := read_document(RunRecord, paths.spec):
            created.append((-record.created_at, record.uid, paths))

    unreadable = _each(list_runs(home), look)
    readable = 0
    for _, _, paths in sorted(created, key=itemgetter(0, 1)):
        if readable == limit:
            break
        failed = refresh_all([paths], database)
        unreadable |= failed
        readable += not failed
    return {paths: unreadable[paths] for paths in sorted(unreadable, key=lambda one: one.name)}


def refresh_all(folders: Iterable[RunPaths], database: Database) -> dict[RunPaths, str]:
    """Refresh every run; those that cannot be read are named, passed over, and returned."""
    return _each(folders, lambda paths: refresh(paths, database))


def _each(folders: Iterable[RunPaths], work: Callable[[RunPaths], object]) -> dict[RunPaths, str]:
    unreadable = {}
    for paths in folders:
        try:
            work(paths)
        except LineageError:
            raise
        # What foreign or damaged files in one run's folder raise must not hide the other runs.
        except (HoldfastError, OSError) as error:
            unreadable[paths] = str(error)
            warn(f"holdfast: {paths.name}: passed over: {error}")
    return unreadable


def secrets_in(paths: RunPaths) -> tuple[str, ...]:
    """The secrets that a run's spec holds in plain text or refers to; none without a folder."""
    record = read_document(RunRecord, paths.spec)
    return known_secrets(record.spec, paths) if record else ()


def open_index() -> Database:
    """The database. Raises `LineageError` with what to do when it cannot be used."""
    from holdfast.lineage.database import open_database

    return open_database()
