"""Find the run or checkpoint that an argument names, and refresh the index from disk.

Folders take precedence over rows. A run is first reconciled with the scheduler and ingested, so
that the output is correct even if no supervisor has been running.
"""

from __future__ import annotations

import contextlib
import difflib
import getpass
import os
import tempfile
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.cli.shared.output import warn
from holdfast.contracts import errors
from holdfast.contracts.disk import reading, visits
from holdfast.contracts.disk.bounds import MADE_UID, UID
from holdfast.contracts.disk.paths import (
    CheckpointName,
    RunPaths,
    default_root,
    given_folder,
    has_spec,
    list_runs,
    plain_checkpoint,
    precedence,
)
from holdfast.contracts.records.checkpoint_choice import choose_checkpoint, is_checkpoint
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history import RunHistory, load_history
from holdfast.contracts.spec.secrets import known_secrets

# Importing SQLAlchemy and submitit takes most of a second, so only commands that use them do it.
if TYPE_CHECKING:
    from holdfast.lineage.database.limits import DatabaseLimits
    from holdfast.lineage.database.transactions import Database

T = TypeVar("T")
WRITER = "cli"


def choose_root(root: str | None) -> Path:
    """Return `root`, or the default root if it is None, as an absolute path."""
    return given_folder(root, "--root") if root else default_root()


def existing_root(root: str | None) -> Path:
    """Return the root that a command reads. Raises `NotFoundError` for a `root` without a folder.

    The default root may be missing, because nothing has been submitted yet.
    """
    home = choose_root(root)
    if root is not None and not home.is_dir():
        near = difflib.get_close_matches(home.name, _folders_in(home.parent), n=1, cutoff=0.5)
        hint = f"; did you mean {home.parent / near[0]}?" if near else ""
        raise errors.NotFoundError(
            f"--root {home}: no such directory, expected the folder that contains the runs{hint}"
        )
    return home


def _folders_in(parent: Path) -> list[str]:
    try:
        return [each.name for each in parent.iterdir() if each.is_dir()]
    except OSError:
        return []


def user_name() -> str:
    """Return the name of the user who runs the command, for the records."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def locate_run(name: str, root: str | None, database: Database | None = None) -> RunPaths:
    """Return the run with this folder path, folder name, spec name or uid.

    Without `root`, a run of another root that the index knows is found too. `database` is the
    index, if the caller has it open. Raises `NotFoundError` with similar names.
    """
    folder = Path(name).expanduser()
    if ("/" in name or folder.is_absolute()) and has_spec(folder):
        return RunPaths(folder.absolute())
    from holdfast.workers.runs.run_folders import find_run

    home = existing_root(root)
    # The run with this uid takes precedence over a folder of that name.
    if MADE_UID.fullmatch(name) and (found := _find_uid(home, name, database)):
        return found
    try:
        return find_run(home, name)
    except errors.NotFoundError:
        is_uid = UID.fullmatch(name) and not MADE_UID.fullmatch(name)
        if is_uid and (found := _search_uid(home, name)):
            return found
        if root is None and (found := _find_elsewhere(name, database)):
            return found
        raise


def _find_elsewhere(name: str, database: Database | None) -> RunPaths | None:
    """Return the run of any root that the index knows by this name or uid, if it is on disk.

    Raises `SpecError` if several roots have such a run: a command must not choose which to stop.
    """
    from holdfast.lineage.queries import pages

    with contextlib.suppress(errors.LineageError), contextlib.ExitStack() as stack:
        index = database or stack.enter_context(open_index())
        similar = pages.list_runs(index, pages.RunFilter(search=name), limit=None).items
        same = [row for row in similar if name in {row["run"], row["name"], row["uid"]}]
        found = [RunPaths(Path(row["path"])) for row in same if has_spec(Path(row["path"]))]
        if len(found) > 1:
            listed = ", ".join(str(paths.directory) for paths in found)
            raise errors.SpecError(
                f"{name!r} names several runs: {listed}; give the folder of one, or --root"
            )
        return found[0] if found else None
    return None


def _find_uid(home: Path, uid: str, database: Database | None) -> RunPaths | None:
    """Return the run under `home` with the uid, from the index if disk agrees, else by search."""
    from holdfast.lineage.queries import run_queries

    # The run may have moved since, or another one may have its folder.
    with contextlib.suppress(errors.HoldfastError, OSError), contextlib.ExitStack() as stack:
        index = database or stack.enter_context(open_index())
        paths = run_queries.find_run(index, uid, home).paths
        if paths.directory.parent == home.resolve() and _has_uid(paths, uid):
            return RunPaths(home / paths.name)
    return _search_uid(home, uid)


def _search_uid(home: Path, uid: str) -> RunPaths | None:
    """Return the run under `home` with the uid. Only specs that contain the uid are parsed."""
    # Ignore folders that cannot be read: another one may have the uid.
    seen = visits.visit(
        list_runs(home), lambda paths: precedence(paths) if _has_uid(paths, uid) else None
    )
    found = [(one.result, one.paths) for one in seen if one.result is not None]
    return min(found, key=itemgetter(0))[1] if found else None


def _has_uid(paths: RunPaths, uid: str) -> bool:
    """Return True if the run has the uid. Raises `OSError` or `HoldfastError` for its spec."""
    if uid.encode() not in reading.read_bounded(paths.spec, below=paths.directory):
        return False
    record = read_document(RunRecord, paths.spec)
    return record is not None and record.uid == uid


def locate_known(name: str, root: str | None, database: Database) -> RunPaths:
    """Like `locate_run`, but also find a run that the index knows and whose folder is gone.

    Raises `NotFoundError` if neither disk nor index has the run.
    """
    from holdfast.lineage.queries import run_queries

    try:
        return locate_run(name, root, database)
    except errors.NotFoundError:
        if root is not None:
            raise
        with contextlib.suppress(errors.NotFoundError):
            return run_queries.find_run(database, name).paths
        raise


def locate_checkpoint(text: str, root: str | None) -> tuple[RunPaths, str]:
    """Return the run and the directory name of a checkpoint, given as its id or its path.

    An id may end in a word of `choose_checkpoint`, such as `latest`.

    The directory need not exist, because the checkpoint may have been deleted. Raises
    `NotFoundError` if `text` is neither an id nor a path.
    """
    run, colon, name = text.rpartition(":")
    if colon and "/" not in name and is_checkpoint(name):
        paths = locate_run(run, root)
        return paths, choose_checkpoint(paths, name)
    path = plain_checkpoint(text)
    paths = RunPaths(path.parent.parent)
    if CheckpointName.parse(path.name) and has_spec(paths.directory):
        return paths, path.name
    raise errors.NotFoundError(
        f"{text!r}: not a checkpoint. Expected an id <run>:<step-…>, as `holdfast checkpoints "
        "RUN` lists them, <run>:latest, <run>:best, <run>:step-20, or the path of its directory."
    )


def refresh(paths: RunPaths, database: Database) -> RunHistory:
    """Reconcile one run with disk and scheduler, ingest it, and return its history."""
    from holdfast.lineage.ingest.run_ingest import ingest_run

    history = look_at(paths)
    ingest_run(database, paths)
    return history


def forget(uid: str) -> None:
    """Remove a run whose folder was deleted from the index, if the index can be used."""
    from holdfast.lineage.index import Index
    from holdfast.lineage.ingest.run_ingest import forget_run

    try:
        with Index() as index:
            forget_run(index.open(), uid)
    except errors.LineageError as error:
        warn(f"holdfast: the index still lists the run; later, run `holdfast reindex`: {error}")


def look_at(paths: RunPaths) -> RunHistory:
    """Reconcile a run with disk and scheduler, and return its history.

    This may write to the run's journal, so another user's run is only read.
    """
    from holdfast.workers.runs.reconcile import reconcile

    if not paths.is_mine():
        return load_history(paths)
    return reconcile(paths, writer=WRITER)


def refresh_newest(home: Path, database: Database, limit: int) -> dict[RunPaths, str]:
    """Refresh the newest runs under `home` until `limit` of them have been read.

    Reads only the specs of the other runs. Returns the unreadable runs by name, with reasons.
    """
    created: list[tuple[float, str, RunPaths]] = []

    def look(paths: RunPaths) -> None:
        if record := read_document(RunRecord, paths.spec):
            created.append((record.created_at, record.uid, paths))

    unreadable = _each(list_runs(home), look)
    readable = 0
    for _, _, paths in sorted(created, key=itemgetter(0, 1), reverse=True):
        if readable == limit:
            break
        failed = refresh_all([paths], database)
        unreadable |= failed
        readable += not failed
    return {paths: unreadable[paths] for paths in sorted(unreadable, key=lambda one: one.name)}


def refresh_all(folders: Iterable[RunPaths], database: Database) -> dict[RunPaths, str]:
    """Refresh every run. Unreadable runs are logged, skipped, and returned with the reasons."""
    return _each(folders, lambda paths: refresh(paths, database))


def _each(folders: Iterable[RunPaths], work: Callable[[RunPaths], object]) -> dict[RunPaths, str]:
    unreadable = {}
    for one in visits.visit(folders, work, raises=(errors.LineageError,)):
        if one.error is not None:
            unreadable[one.paths] = one.reason
            warn(f"holdfast: {one.paths.name}: skipped: {one.reason}")
    return unreadable


def secrets_in(paths: RunPaths) -> tuple[str, ...]:
    """Return the secrets that a run's spec contains or refers to; none if it has no folder."""
    record = read_document(RunRecord, paths.spec)
    return known_secrets(record.spec, paths) if record else ()


def read_index(work: Callable[[Database], T]) -> T:
    """Return `work(index)` for a command that only reads, with or without the user's index.

    The folders of the runs are authoritative. If the index in `$HOLDFAST_HOME` cannot be written, a
    temporary one is filled from the folders that `work` reads. Raises `LineageError` for a
    database that HOLDFAST_DATABASE_URL names.
    """
    from holdfast.lineage.database.sqlite_file import URL_VARIABLE
    from holdfast.lineage.database.transactions import open_database

    try:
        with open_index() as database:
            return work(database)
    except errors.LineageError as error:
        if os.environ.get(URL_VARIABLE):
            raise
        warn(f"holdfast: {error}")
    warn("holdfast: answering from the runs' folders, without runs of other roots")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-index-") as folder,
        open_database(f"sqlite:///{folder}/index.db") as database,
    ):
        return work(database)


def open_index(limits: DatabaseLimits | None = None) -> Database:
    """Open the index. Raises `LineageError`, with the next step, if it cannot be used."""
    from holdfast.lineage.database.transactions import open_database

    return open_database(limits=limits) if limits else open_database()
