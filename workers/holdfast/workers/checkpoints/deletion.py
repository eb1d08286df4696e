"""Delete checkpoints: first the journal line, then the commit record, then the bytes.

One rename decides: the manifest becomes the tombstone. Before it the checkpoint is whole, after it
the checkpoint no longer exists, and only one of several concurrent deleters succeeds. Then readers
and pins are checked again. If there is one, the manifest is renamed back (see `contracts.leases`).
Otherwise a second rename removes the directory, which makes the deletion final. Renames need no
space, so they also work on a full disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from holdfast.contracts.disk import durable, leases
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import committed_checkpoints, read_tombstone
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import (
    MANIFEST,
    CheckpointName,
    RunPaths,
    base_of,
    hold,
    real_folder,
)
from holdfast.contracts.errors import MirrorError, reading_run
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history import (
    RunHistory,
    check_identity,
    load_identity,
    pinned_checkpoints,
)
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.checkpoints import retention
from holdfast.workers.checkpoints.retention import KeepVerdict
from holdfast.workers.checkpoints.trainer_call import NEUTRAL_FOLDER

# Delete the copies of a run's deleted checkpoints from its mirror.
#
# `python -m holdfast.trainer.mirror` does the work, bounded in time, because only the trainer has
# the libraries for object stores. The deleting process needs the store's credentials.

TIMEOUT_S: Final = 300.0
# After a failure the mirror is not tried for a while, because pruning happens often.
RETRY_S: Final = 300.0
NAMES_MAX: Final = 100
DONE_SUFFIX: Final = ".unmirrored"
FAILED_NAME: Final = ".mirror-failed"


def location_of(paths: RunPaths) -> str | None:
    """Return the URL of the run's location in its mirror; None if its spec has no mirror.

    The location contains the run's whole uid. Raises `MirrorError` for another user's run, because
    its spec would choose where the caller's credentials are sent. Raises `UnreadableRunError` for a
    spec that belongs to another folder.
    """
    record = read_document(RunRecord, paths.spec)
    if record is None:
        return None
    check_identity(paths, record)
    with reading_run(paths.directory):
        mirror = RunSpec.read(record.spec).checkpoint.mirror
    if not mirror:
        return None
    if not paths.is_mine():
        raise MirrorError(
            f"{paths.name}: this run belongs to another user, and only that user may change its "
            "mirror; run the command as the owner of the run's folder"
        )
    return Tiers(mirror=mirror).location(record.run, record.uid)


def ask(location: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the answer of `python -m holdfast.trainer.mirror`.

    Raises `MirrorError` if it failed, did not answer in time or could not start.
    """
    command = [sys.executable, "-m", "holdfast.trainer.mirror", location, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            cwd=NEUTRAL_FOLDER,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise MirrorError(
            f"{location}: no answer within {timeout_s:.0f} s", is_passing=True
        ) from error
    except ValueError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise MirrorError(f"{location}: {' '.join(last) or 'no answer'}") from error
    if "error" in answer:
        raise MirrorError(str(answer["error"]))
    return answer


def delete_copies(paths: RunPaths, *, writer: str) -> list[str]:
    """Delete the copies of checkpoints that were deleted here; return their names.

    If the mirror refuses, this journals the error and does not raise. A later call tries again.
    """
    names = _deleted_here(paths)[:NAMES_MAX]
    if not names or _has_failed_lately(paths):
        return []
    try:
        location = location_of(paths)
        if location is None:
            return []
        ask(location, "delete", *names)
    except MirrorError as error:
        text = f"copies of {len(names)} deleted checkpoints are still in the mirror: {error}"
        _record_failure(paths, text, writer)
        return []
    for name in names:
        _mark(paths, f"{name}{DONE_SUFFIX}")
    return names


def _deleted_here(paths: RunPaths) -> list[str]:
    """Return the checkpoints that are deleted here and may still have copies in the mirror."""
    try:
        found = set(os.listdir(paths.tombstones))
    except FileNotFoundError:
        return []
    names = (name.removesuffix(".json") for name in found if name.endswith(".json"))
    return [
        name
        for name in sorted(names)
        if f"{name}{DONE_SUFFIX}" not in found
        and CheckpointName.parse(name)
        and not paths.checkpoint(name).exists()
    ]


def _record_failure(paths: RunPaths, text: str, writer: str) -> None:
    _mark(paths, FAILED_NAME)
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(EventKind.NOTE, text=text)


def _mark(paths: RunPaths, name: str) -> None:
    """Create an empty file beside the tombstones."""
    folder = real_folder(paths.tombstones)
    durable.write_bytes(folder / name, b"", below=base_of(folder))


def _has_failed_lately(paths: RunPaths) -> bool:
    try:
        failed_at = (paths.tombstones / FAILED_NAME).lstat().st_mtime
    except FileNotFoundError:
        return False
    # The file server has another clock, so a time that is far in the future proves nothing.
    return abs(time.time() - failed_at) < RETRY_S


# The command `prune`: delete a run's checkpoints by its keep rules, or only list them.

OVERTAKEN: Final = "a reader or a pin appeared meanwhile, or another process is deleting it"


def prune(
    paths: RunPaths, *, by: str, writer: str = "cli", dry_run: bool, keep: Keep | None = None
) -> dict[str, Any]:
    """Prune the run and return the facts of `prune --json`; with `dry_run`, delete nothing.

    `keep` replaces the rules of the run's spec.
    """
    plan = retention.plan_run(paths, keep=keep)
    deleted_names = {one.name for one in plan if not one.is_kept}
    if not dry_run:
        deleted_names = {one.name for one in apply(paths, by=by, writer=writer, keep=keep)}
    deleted = [_facts(one, one.reason) for one in plan if one.name in deleted_names]
    kept = [
        _facts(one, one.reason if one.is_kept else OVERTAKEN)
        for one in plan
        if one.name not in deleted_names
    ]
    return {
        "run": paths.name,
        "dry_run": dry_run,
        "deleted": deleted,
        "kept": kept,
        "bytes_deleted": sum(one["bytes"] for one in deleted),
        "bytes_kept": sum(one["bytes"] for one in kept),
    }


def _facts(verdict: KeepVerdict, reason: str) -> dict[str, Any]:
    return {
        "checkpoint": verdict.name,
        "step": verdict.step,
        "bytes": verdict.bytes,
        "reason": reason,
    }


UNDECIDED_S: Final = 600.0
LATELY_S: Final = 60.0


def apply(
    paths: RunPaths,
    *,
    by: str,
    writer: str = "flow",
    copies: bool = True,
    history: RunHistory | None = None,
    keep: Keep | None = None,
) -> list[KeepVerdict]:
    """Delete the checkpoints that nothing keeps; return their verdicts.

    `keep` replaces the rules of the run's spec. `history` is what the caller has just read of the
    run. Pins are read again before each deletion.
    With `copies`, their copies in the run's mirror are deleted too, which may take long. Several
    processes may call this together: each checkpoint is deleted and journaled by one of them.
    """
    with _held(paths) as held:
        finish_deletions(held)
        verdicts = [one for one in retention.plan_run(held, history, keep) if not one.is_kept]
        if verdicts:
            # Deletions rely on a newer checkpoint, so that one must survive a power cut before they
            # begin.
            make_newest_durable(held)
        deleted = [
            one
            for one in verdicts
            if _delete(held, one.name, reason=one.reason, by=by, writer=writer)
        ]
    if copies and load_identity(paths)[1].checkpoint.mirror:
        delete_copies(paths, writer=writer)
    return deleted


def free_space(paths: RunPaths, *, writer: str) -> tuple[int, str]:
    """Free what the keep rules allow on a full disk; return the bytes freed and a description.

    Checkpoints that other processes deleted within `LATELY_S` count too, because the caller may
    not have seen that yet.
    """
    deleted = apply(paths, by="a full disk", writer=writer, copies=False)
    with _held(paths) as held:
        torn_bytes = remove_torn(held)
    done = [f"deleted {counted(len(deleted), 'checkpoint')} that nothing keeps"]
    if torn_bytes:
        done.append(f"{torn_bytes} bytes of uncommitted saves were removed")
    left = [f"{one.name} ({one.reason})" for one in retention.plan_run(paths) if one.is_kept]
    return torn_bytes + _deleted_lately(paths), (
        f"{', '.join(done)}. The remaining checkpoints are kept: {', '.join(left) or 'none'}. "
        "Lower checkpoint.keep, unpin checkpoints, raise checkpoint.budget or free other space"
    )


@contextlib.contextmanager
def _held(paths: RunPaths) -> Iterator[RunPaths]:
    """Hold the changed folders open, so that no symbolic link can redirect a deletion."""
    for folder in (paths.checkpoints, paths.tombstones):
        if not folder.is_dir():
            durable.make_directory(folder)
    with hold(paths) as held:
        yield held


def make_newest_durable(paths: RunPaths) -> None:
    """Make the newest checkpoint, which remains, survive a power cut.

    Its manifest becomes readable a moment before its name is durable.
    """
    newest = committed_checkpoints(paths)[-1:]
    for manifest in newest:
        directory = paths.checkpoint(manifest.name)
        durable.fsync_directory(directory)
        durable.fsync_directory(paths.checkpoints)


def finish_deletions(paths: RunPaths) -> None:
    """Finish the interrupted deletions of any process."""
    for directory in paths.list_checkpoints():
        tombstone = paths.tombstone(directory.name)
        if (directory / MANIFEST).exists() or not tombstone.exists():
            continue
        # A deleter that has just renamed the manifest may still rename it back. One that was killed
        # before that will not.
        is_decided = (
            leases.storage_time(paths.checkpoints) - tombstone.lstat().st_ctime > UNDECIDED_S
        )
        if is_decided and not leases.readers(directory):
            _move_to_removing(paths, directory.name)
    for directory in paths.list_removing():
        shutil.rmtree(directory, ignore_errors=True)


def remove_torn(paths: RunPaths) -> int:
    """Remove uncommitted saves of ended attempts; return the bytes freed.

    No process can finish them. A save that changed within `UNDECIDED_S` is left alone anyway.
    """
    over = {a.number for a in load_tallied(paths).attempts if a.state.is_terminal}
    freed = 0
    for directory in paths.list_checkpoints():
        name = CheckpointName.parse(directory.name)
        if name is None or name.attempt not in over or (directory / MANIFEST).exists():
            continue
        try:
            status = [p.lstat() for p in (directory, *directory.rglob("*"))]
        except FileNotFoundError:
            continue  # Another process is changing it.
        changed_at = max(one.st_mtime for one in status)
        if leases.storage_time(paths.checkpoints) - changed_at > UNDECIDED_S:
            freed += sum(one.st_size for one in status)
            _move_to_removing(paths, directory.name)
            shutil.rmtree(paths.removing(directory.name), ignore_errors=True)
    return freed


def _delete(paths: RunPaths, checkpoint: str, *, reason: str, by: str, writer: str) -> bool:
    """Delete a checkpoint; return False if another process deletes it or it is kept after all."""
    directory, tombstone = paths.checkpoint(checkpoint), paths.tombstone(checkpoint)
    # A cheap look first. The one that decides comes after the rename.
    if leases.readers(directory):
        return False
    facts = {"checkpoint": checkpoint, "reason": reason, "by": by}
    # The line comes first: SQL and the run's history are rebuilt from the journal.
    is_journaled = _journal(paths, writer, EventKind.CHECKPOINT_DELETED, **facts)
    durable.make_directory(paths.tombstones)
    try:
        # The rename selects one of several deleters and needs no space, see decision 12.
        os.rename(directory / MANIFEST, tombstone)
    except FileNotFoundError:
        return False
    # Checked again after the rename. A reader that created its lease before sees no manifest now,
    # or this look sees its lease.
    kept_by = _protected_since(paths, checkpoint)
    if kept_by:
        os.rename(tombstone, directory / MANIFEST)
        durable.fsync_directory(directory)
        text = f"{checkpoint} was not deleted: it is {kept_by}"
        _journal(paths, writer, EventKind.NOTE, text=text)
        return False
    # Both ends of the rename: until then, a power cut could bring the manifest back to a directory
    # whose files are gone.
    for parent in (paths.tombstones, directory):
        durable.fsync_directory(parent)
    _move_to_removing(paths, checkpoint)
    shutil.rmtree(paths.removing(checkpoint), ignore_errors=True)
    durable.fsync_directory(paths.checkpoints)
    if not is_journaled:
        # The disk was too full for the line before. Now there is space.
        _journal(paths, writer, EventKind.CHECKPOINT_DELETED, **facts)
    return True


def _deleted_lately(paths: RunPaths) -> int:
    """Return the bytes of the checkpoints whose manifests became tombstones within `LATELY_S`."""
    freed, now = 0, leases.storage_time(paths.tombstones)
    for tombstone in paths.tombstones.glob("*.json"):
        if now - tombstone.lstat().st_ctime < LATELY_S:
            # The size of a checkpoint with an unreadable tombstone is unknown.
            manifest = read_tombstone(tombstone)
            freed += manifest.bytes if manifest else 0
    return freed


def _protected_since(paths: RunPaths, checkpoint: str) -> str:
    """Return the reader or pin that appeared after the verdict, or ''."""
    who = leases.readers(paths.checkpoint(checkpoint))
    if who:
        return f"being read by {', '.join(who)}"
    return "pinned" if checkpoint in pinned_checkpoints(load_tallied(paths).events) else ""


def _journal(paths: RunPaths, writer: str, kind: EventKind, **facts: Any) -> bool:
    """Journal a line; return False if the disk is too full for it."""
    try:
        with JournalWriter(paths.journal_of(writer)) as journal:
            journal.append(kind, **facts)
    except OSError as error:
        if error.errno not in durable.STORAGE_FULL:
            raise
        return False
    return True


def _move_to_removing(paths: RunPaths, checkpoint: str) -> None:
    """Move a directory out of the listing; harmless if another process was faster."""
    with contextlib.suppress(FileNotFoundError):
        # The directory leaves the listing in one step, so nobody finds half a checkpoint.
        os.rename(paths.checkpoint(checkpoint), paths.removing(checkpoint))
    durable.fsync_directory(paths.checkpoints)
