"""Create, find and attach to runs. A run is a folder that contains a `spec.json`."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from holdfast.contracts import errors
from holdfast.contracts.disk import durable, file_locks, reading, roots
from holdfast.contracts.disk.paths import (
    OF_RUN,
    RUN_NAME,
    RunPaths,
    has_spec,
    list_runs,
    real_folder,
)
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records import history_cache, supervision
from holdfast.contracts.records.documents import RunRecord, create_document, read_document
from holdfast.contracts.spec import part, written
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import RunState
from holdfast.workers.runs.code_snapshot import CodeFiles, copy_code, find_code

# Enough for a few journal lines and documents.
RESERVE_BYTES: Final = 64 * 1024
T = TypeVar("T")
_GENERATION = re.compile(r"(?P<name>[^.]+)(?:\.r(?P<generation>[1-9]\d{0,6}))?")


@dataclass(frozen=True, kw_only=True)
class ForkPoint:
    """The committed checkpoint that a new run starts from."""

    checkpoint_id: str
    path: Path
    run_uid: str


def create_run(
    spec: RunSpec,
    root: Path,
    *,
    created_by: str,
    folder: str | None = None,
    forked: ForkPoint | None = None,
    imported_from: str | None = None,
    fill: Callable[[RunPaths, str], object] = lambda *_: None,
) -> RunPaths:
    """Create the folder of a new run and its `spec.json`, durably.

    `folder` defaults to the spec's name. `fill` gets the folder and the run's uid before the folder
    becomes a run. Raises `RunConflictError` if the folder exists already, or if another process
    creates this run now, and `PreflightError` if the code is too large for a snapshot.
    """
    is_snapshot = spec.launch.code == "snapshot"
    code = find_code(Path(spec.launch.working_directory)) if is_snapshot else None
    paths = RunPaths(root / (folder or spec.name))
    durable.make_directory(root)
    roots.ensure_root_id(root)
    try:
        paths.directory.mkdir()
    except FileExistsError:
        if not _is_abandoned(paths):
            raise errors.RunConflictError(
                f"{paths.directory}: a run of this name exists already; give another name"
            ) from None
    durable.fsync_directory(root)
    record = RunRecord(
        uid=uuid.uuid4().hex,
        run=paths.name,
        name=spec.name,
        root=str(root),
        created_at=time.time(),
        created_by=created_by,
        spec=spec.model_dump(mode="json"),
        spec_digest=spec.digest,
        given=spec.given,
        origins=spec.origins,
        forked_from=forked.checkpoint_id if forked else None,
        forked_path=str(forked.path) if forked else None,
        forked_uid=forked.run_uid if forked else None,
        imported_from=imported_from,
    )
    with _creating(paths):
        _fill_folder(paths, spec, record, code)
        fill(paths, record.uid)
        # Last, because a folder without it is not a run. So a run appears complete or not at all,
        # see decision 78.
        if not create_document(paths.spec, record):
            raise _created_meanwhile(paths)
    return paths


def _fill_folder(paths: RunPaths, spec: RunSpec, record: RunRecord, code: CodeFiles | None) -> None:
    """Write what a run's folder has before its `spec.json`; the caller holds its lock.

    An earlier process that did not finish may have left parts.
    """
    if spec.checkpoint.directory:
        # Before anything else is written: `checkpoints` cannot become a link once it is a folder.
        _link_checkpoints(paths, Path(spec.checkpoint.directory) / f"{paths.name}.{record.uid}")
    for directory in (paths.journal, paths.attempts, paths.checkpoints, paths.tombstones):
        durable.make_directory(directory)
    keep_reserve(paths)
    if code is not None:
        copy_code(code, paths.code)


@contextlib.contextmanager
def _creating(paths: RunPaths) -> Iterator[None]:
    """Hold the lock of a folder that becomes a run, so that one process writes all its parts.

    Raises `RunConflictError` if another process holds it, or has created the run.
    """
    with file_locks.locked(paths.orders_lock, 0.0) as is_locked:
        if not is_locked or has_spec(paths.directory):
            raise _created_meanwhile(paths)
        yield


def _created_meanwhile(paths: RunPaths) -> errors.RunConflictError:
    return errors.RunConflictError(
        f"{paths.directory}: another process created this run at the same time; "
        "run the same command again to attach to it"
    )


def _link_checkpoints(paths: RunPaths, target: Path) -> None:
    """Put the run's checkpoints and tombstones into `target`, and links in their places.

    Both are on the same storage, because a deletion renames a manifest to a tombstone. An earlier
    process that did not finish may have left links, which then count.
    """
    try:
        paths.checkpoints.symlink_to(target / paths.checkpoints.name)
    except FileExistsError:
        if not paths.checkpoints.is_symlink():
            return
        target = real_folder(paths.checkpoints).parent
    # A link must not lead to a missing folder: `real_folder` would follow it.
    for folder in (paths.checkpoints, paths.tombstones):
        durable.make_directory(target / folder.name)
    with contextlib.suppress(FileExistsError):
        paths.tombstones.symlink_to(target / paths.tombstones.name)
    with contextlib.suppress(FileExistsError):
        (target / OF_RUN).symlink_to(paths.directory.absolute())
    durable.fsync_directory(target)
    durable.fsync_directory(paths.directory)


def keep_reserve(paths: RunPaths) -> None:
    """Reserve space in the run's folder, so that an operator's request fits on a full disk."""
    if not paths.reserve.exists():
        # Random bytes take up space even on compressing file systems.
        durable.write_bytes(paths.reserve, os.urandom(RESERVE_BYTES), mode=0o600)


def release_reserve(paths: RunPaths) -> bool:
    """Free the reserved space for a write that must happen now; return False if there was none."""
    try:
        paths.reserve.unlink()
    except FileNotFoundError:
        return False
    return True


def with_reserve(paths: RunPaths, write: Callable[[], T]) -> T:
    """Call `write`, and once more with the reserved space if storage is full."""
    try:
        return write()
    except OSError as error:
        if error.errno not in durable.STORAGE_FULL or not release_reserve(paths):
            raise
    return write()


def attach_or_create(spec: RunSpec, root: Path, *, created_by: str) -> tuple[RunPaths, bool]:
    """Return the run that `spec` describes under `root`, and True if it was created.

    Only the caller's own runs count, because attaching to a run starts what its spec says. The
    newest generation of the name decides. If it is live or completed and has the same digest, it is
    returned. If it ended with another digest, a new generation (`name.r2`, …) is created. Raises
    `RunConflictError` if a run with another spec is live under the name, or if the same spec's run
    failed or was cancelled: only `relaunch` continues such a run.
    """
    newest = newest_generation(root, spec.name)
    if newest is None:
        return create_run(spec, root, created_by=created_by), True
    following = f"{spec.name}.r{_last_generation(root, spec.name) + 1}"
    if not _is_own(newest):
        return create_run(spec, root, created_by=created_by, folder=following), True
    record = read_record(newest)
    state = history_cache.load_tallied(newest).state
    same = is_same_spec(record, spec) and not newer_keys(record)
    if same and (state.is_live or state is RunState.COMPLETED):
        return newest, False
    if same:
        raise errors.RunConflictError(
            f"run {newest.name} {how_ended(state)}; `holdfast relaunch {newest.name}` continues it "
            "from its newest checkpoint; give another name to start again"
        )
    if state.is_live:
        digests = f"digest {record.spec_digest[:12]}, given {spec.digest[:12]}"
        keys = ", ".join(_written_otherwise(record, spec))
        only = f"only one of them has {keys}" if record.spec_digest == spec.digest else digests
        raise errors.RunConflictError(
            f"run {newest.name} is {state} with another spec ({only}); "
            "the spec of a live run cannot change. Stop the run first, "
            "or `holdfast fork` one of its checkpoints under a new name"
        )
    return create_run(spec, root, created_by=created_by, folder=following), True


def is_same_spec(record: RunRecord, spec: RunSpec) -> bool:
    """Return True if `spec` describes the run of `record`, whichever Holdfast version recorded it.

    The recorded spec is compared as this version reads it, so a key that is new here has its
    default in both. The keys that the user gave are compared too, so that a changed default makes
    no difference. A written key that the program could give otherwise is another spec than one
    without it, except in the record itself, which has every key.
    """
    if record.given == spec.given:
        return True
    if spec.digest not in {record.spec_digest, RunSpec.read(record.spec).digest}:
        return False
    return spec.given == RunSpec.read(record.spec).given or not _written_otherwise(record, spec)


def _written_otherwise(record: RunRecord, spec: RunSpec) -> list[str]:
    """Return the keys that the program can give too and that only one of the two has."""
    then, now = record.read_spec().sources, spec.sources
    return [key for key in written.OF_PROGRAM if (key in then) != (key in now)]


def newer_keys(record: RunRecord) -> list[str]:
    """Return the keys that the user gave and that this version does not know.

    Unknown keys that only have their defaults in the newer version do not count. If the record
    has no list of the given keys, all keys count.
    """
    return part.unknown_keys(record.spec if record.given is None else record.given, RunSpec)


def why_not_submitted(record: RunRecord) -> str:
    """Return why this version of Holdfast cannot submit attempts of a run, or ''."""
    newer = newer_keys(record)
    if not newer:
        return ""
    return (
        "a newer version of Holdfast recorded the run, with keys that this version does not know: "
        f"{', '.join(newer)}; relaunch it with that version"
    )


def newest_generation(root: Path, name: str) -> RunPaths | None:
    """Return the newest run with spec name `name` under `root`, the caller's own first, or None."""
    found = _generations(root, name)
    return max(found, key=lambda run: (_is_own(run), _generation(run.name)), default=None)


def own_generation(root: Path, name: str) -> RunPaths | None:
    """Return the caller's own newest run with spec name `name` under `root`, or None.

    Another user's run of that name does not matter.
    """
    newest = newest_generation(root, name)
    return newest if newest is not None and _is_own(newest) else None


def _last_generation(root: Path, name: str) -> int:
    return max((_generation(run.name) for run in _generations(root, name)), default=0)


def _generations(root: Path, name: str) -> list[RunPaths]:
    return list_runs(root, lambda folder: _name_of(folder) == name)


def next_folder(root: Path, name: str) -> RunPaths | None:
    """Return where the next run with spec name `name` would be.

    Returns None while one is supervised, and if `root` cannot be read.
    """
    try:
        newest, last = own_generation(root, name), _last_generation(root, name)
    except OSError:
        return None
    if newest is not None and supervision.is_supervised(newest.flow_lock):
        return None
    return RunPaths(root / (f"{name}.r{last + 1}" if last else name))


def require_own(paths: RunPaths) -> None:
    """Raise `SpecError` for another user's run: its command would run as the caller."""
    if not paths.is_mine():
        raise errors.SpecError(
            f"run {paths.name} belongs to another user, whose command would run as you. Ask its "
            "owner to relaunch it, or read its spec "
            f"(`holdfast show {paths.name} --json`) and fork one of its checkpoints."
        )


def _is_own(run: RunPaths) -> bool:
    try:
        return run.is_mine()
    except OSError:
        return False


def find_run(root: Path, name: str) -> RunPaths:
    """Return the run called `name`: the folder of that name, or the name's newest generation.

    Raises `NotFoundError`, with similar names, if there is none.
    """
    exact = RunPaths(root / name)
    if RUN_NAME.fullmatch(name) and has_spec(exact.directory):
        return exact
    newest = newest_generation(root, name)
    if newest is not None:
        return newest
    there = [run.name for run in list_runs(root)]
    near = difflib.get_close_matches(name, there, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "list the runs with `holdfast runs`"
    raise errors.NotFoundError(
        f"no run {name!r} under {root} ({counted(len(there), 'run')} there); {hint}"
    )


def read_record(paths: RunPaths) -> RunRecord:
    """Return the run's `spec.json`. Raises `NotFoundError` if the folder is not a run."""
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise errors.NotFoundError(
            f"{paths.directory}: no run here (no spec.json); list the runs with `holdfast runs`"
        )
    return record


def _is_abandoned(paths: RunPaths) -> bool:
    """Return True for the caller's own folder that a crash left before it held a run."""
    is_empty = not has_spec(paths.directory) and not any(paths.attempts.glob("*"))
    # An import holds the lock until the folder is a run.
    is_free = supervision.is_supervised(paths.flow_lock) is False
    return is_empty and is_free and reading.is_mine(paths.directory)


def how_ended(state: RunState) -> str:
    """Return how a run that did not complete ended, for a message."""
    return "was cancelled" if state is RunState.CANCELLED else "has failed"


def _name_of(folder: str) -> str:
    match = _GENERATION.fullmatch(folder)
    return match["name"] if match else folder


def _generation(folder: str) -> int:
    match = _GENERATION.fullmatch(folder)
    return int(match["generation"] or 1) if match else 1
