"""Delete checkpoints: first the journal line, then the commit record, then the bytes.

One rename decides: the manifest becomes the tombstone. Before it the checkpoint is whole, after it
the checkpoint no longer exists, and only one of several concurrent deleters succeeds. Then readers
and pins are checked again. If there is one, the manifest is renamed back (see `contracts.leases`).
Otherwise a second rename removes the directory, which makes the deletion final. Renames need no
space, so they also work on a full disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any, Final

from holdfast.contracts.disk.durable import STORAGE_FULL, fsync_directory, make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.leases import readers, storage_time
from holdfast.contracts.disk.manifest import read_tombstone
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths, hold
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history import RunHistory, load_identity, pinned_checkpoints
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.workers.checkpoints import retention
from holdfast.workers.checkpoints.manifests import committed_checkpoints
from holdfast.workers.checkpoints.mirrors import delete_copies
from holdfast.workers.checkpoints.retention import Verdict

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
) -> list[Verdict]:
    """Delete the checkpoints that nothing keeps; return their verdicts.

    `keep` replaces the rules of the run's spec. `history` is what the caller has just read of the
    run. Pins are read again before each deletion.
    With `copies`, their copies in the run's mirror are deleted too, which may take long. Several
    processes may call this at once: each checkpoint is deleted and journaled by one of them.
    """
    with _held(paths) as held:
        finish_deletions(held)
        verdicts = [one for one in retention.plan_run(held, history, keep) if not one.is_kept]
        if verdicts:
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
            make_directory(folder)
    with hold(paths) as held:
        yield held


def make_newest_durable(paths: RunPaths) -> None:
    """Make the newest checkpoint, which remains, survive a power cut.

    Its manifest becomes readable a moment before its name is durable.
    """
    newest = committed_checkpoints(paths)[-1:]
    for manifest in newest:
        directory = paths.checkpoint(manifest.name)
        fsync_directory(directory)
        fsync_directory(paths.checkpoints)


def finish_deletions(paths: RunPaths) -> None:
    """Finish the interrupted deletions of any process."""
    for directory in paths.list_checkpoints():
        tombstone = paths.tombstone(directory.name)
        if (directory / MANIFEST).exists() or not tombstone.exists():
            continue
        # A deleter that has just renamed the manifest may still rename it back. One that was killed
        # before that will not.
        is_decided = storage_time(paths.checkpoints) - tombstone.lstat().st_ctime > UNDECIDED_S
        if is_decided and not readers(directory):
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
        if storage_time(paths.checkpoints) - changed_at > UNDECIDED_S:
            freed += sum(one.st_size for one in status)
            _move_to_removing(paths, directory.name)
            shutil.rmtree(paths.removing(directory.name), ignore_errors=True)
    return freed


def _delete(paths: RunPaths, checkpoint: str, *, reason: str, by: str, writer: str) -> bool:
    """Delete a checkpoint; return False if another process deletes it or it is kept after all."""
    directory, tombstone = paths.checkpoint(checkpoint), paths.tombstone(checkpoint)
    if readers(directory):
        return False
    facts = {"checkpoint": checkpoint, "reason": reason, "by": by}
    is_journaled = _journal(paths, writer, EventKind.CHECKPOINT_DELETED, **facts)
    make_directory(paths.tombstones)
    try:
        os.rename(directory / MANIFEST, tombstone)
    except FileNotFoundError:
        return False
    kept_by = _protected_since(paths, checkpoint)
    if kept_by:
        os.rename(tombstone, directory / MANIFEST)
        fsync_directory(directory)
        text = f"{checkpoint} was not deleted: it is {kept_by}"
        _journal(paths, writer, EventKind.NOTE, text=text)
        return False
    for parent in (paths.tombstones, directory):
        fsync_directory(parent)
    _move_to_removing(paths, checkpoint)
    shutil.rmtree(paths.removing(checkpoint), ignore_errors=True)
    fsync_directory(paths.checkpoints)
    if not is_journaled:
        # The disk was too full for the line before. Now there is space.
        _journal(paths, writer, EventKind.CHECKPOINT_DELETED, **facts)
    return True


def _deleted_lately(paths: RunPaths) -> int:
    """Return the bytes of the checkpoints whose manifests became tombstones within `LATELY_S`."""
    freed, now = 0, storage_time(paths.tombstones)
    for tombstone in paths.tombstones.glob("*.json"):
        if now - tombstone.lstat().st_ctime < LATELY_S:
            # The size of a checkpoint with an unreadable tombstone is unknown.
            manifest = read_tombstone(tombstone)
            freed += manifest.bytes if manifest else 0
    return freed


def _protected_since(paths: RunPaths, checkpoint: str) -> str:
    """Return the reader or pin that appeared after the verdict, or ''."""
    who = readers(paths.checkpoint(checkpoint))
    if who:
        return f"being read by {', '.join(who)}"
    return "pinned" if checkpoint in pinned_checkpoints(load_tallied(paths).events) else ""


def _journal(paths: RunPaths, writer: str, kind: EventKind, **facts: Any) -> bool:
    """Journal a line; return False if the disk is too full for it."""
    try:
        with JournalWriter(paths.journal_of(writer)) as journal:
            journal.append(kind, **facts)
    except OSError as error:
        if error.errno not in STORAGE_FULL:
            raise
        return False
    return True


def _move_to_removing(paths: RunPaths, checkpoint: str) -> None:
    """Move a directory out of the listing; harmless if another process was faster."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(paths.checkpoint(checkpoint), paths.removing(checkpoint))
    fsync_directory(paths.checkpoints)
