"""Deleting checkpoints: the journal first, then the commit record, then the bytes.

What counts is one rename: the manifest becomes the tombstone. Before it the checkpoint is whole,
after it there is none, and of several who delete at once exactly one succeeds. Then readers and
pins are looked for once more: when there is one, the manifest goes back (see `contracts.leases`),
else a second rename takes the directory away and its fate is sealed. Renames need no room, so a
full disk does not keep anybody from freeing it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any, Final

from holdfast.contracts.durable import fsync_directory, make_directory
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.history import load_events, load_history, pinned_checkpoints
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.leases import readers
from holdfast.contracts.manifest import read_manifest, read_tombstone
from holdfast.contracts.paths import MANIFEST, CheckpointName, RunPaths, checkpoint_id, hold
from holdfast.workers import retention
from holdfast.workers.checkpoints import committed_checkpoints
from holdfast.workers.mirrors import delete_copies
from holdfast.workers.retention import Verdict

UNDECIDED_S: Final = 600.0
LATELY_S: Final = 60.0
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def apply(paths: RunPaths, *, by: str, writer: str = "flow", copies: bool = True) -> list[Verdict]:
    """Delete what nothing keeps; returns the verdicts that were carried out.

    With `copies` those in the run's mirror go too, which may take as long as the mirror likes.
    Others may do the same at the same time: each checkpoint is deleted, and told of, by one.
    """
    with _held(paths) as held:
        finish_deletions(held)
        verdicts = [one for one in retention.plan_run(held) if not one.is_kept]
        if verdicts:
            make_newest_durable(held)
        deleted = [
            one
            for one in verdicts
            if _delete(held, one.name, reason=one.reason, by=by, writer=writer)
        ]
    if copies:
        delete_copies(paths, writer=writer)
    return deleted


def free_space(paths: RunPaths, *, writer: str) -> tuple[int, str]:
    """Free what the keep rules allow, on a full disk: (bytes freed, what was done, in words).

    What others have deleted within `LATELY_S` counts too: the asker may not have seen it yet.
    """
    deleted = apply(paths, by="a full disk", writer=writer, copies=False)
    with _held(paths) as held:
        torn_bytes = remove_torn(held)
    done = [f"{len(deleted)} checkpoints that no keep rule keeps were deleted"]
    if torn_bytes:
        done.append(f"{torn_bytes} bytes of saves that were never committed were removed")
    left = [f"{one.name} ({one.reason})" for one in retention.plan_run(paths) if one.is_kept]
    return torn_bytes + _deleted_lately(paths), (
        f"{', '.join(done)}. What is left is kept: {', '.join(left) or 'nothing'}. Lower "
        "checkpoint.keep, unpin, raise checkpoint.budget or make room"
    )


def delete_checkpoint(
    paths: RunPaths, checkpoint: str, *, reason: str, by: str, writer: str = "cli"
) -> int:
    """Delete a committed checkpoint for a stated reason; returns the bytes freed.

    0 when somebody else deletes it at this moment, or a reader or a pin came in between. Raises
    `NotFoundError` when there is none, and `SpecError` for one that is pinned, the newest, in use
    or being read.
    """
    with _held(paths) as held:
        manifest = read_manifest(held.checkpoint(checkpoint))
        name = checkpoint_id(paths.name, checkpoint)
        if manifest is None:
            raise NotFoundError(
                f"{name}: no such committed checkpoint; `holdfast checkpoints {paths.name}` lists "
                "them"
            )
        history = load_history(held)
        reason = retention.protection(history, committed_checkpoints(held), checkpoint)
        if reason:
            raise SpecError(f"{name} is kept: it is {reason}")
        make_newest_durable(held)
        is_done = _delete(held, checkpoint, reason=reason, by=by, writer=writer)
    delete_copies(paths, writer=writer)
    return manifest.bytes if is_done else 0


@contextlib.contextmanager
def _held(paths: RunPaths) -> Iterator[RunPaths]:
    """The run with the folders that are changed held open: no link leads a deletion elsewhere."""
    for folder in (paths.checkpoints, paths.tombstones):
        if not folder.is_dir():
            make_directory(folder)
    with hold(paths) as held:
        yield held


def make_newest_durable(paths: RunPaths) -> None:
    """See to it that the checkpoint which remains would survive a power cut.

    Its manifest can be read as soon as it has its name, a moment before the name is durable.
    """
    newest = committed_checkpoints(paths)[-1:]
    for manifest in newest:
        directory = paths.checkpoint(manifest.name)
        fsync_directory(directory)
        fsync_directory(paths.checkpoints)


def finish_deletions(paths: RunPaths) -> None:
    """Remove what deletions that were cut short have left, by whomever."""
    for directory in paths.list_checkpoints():
        tombstone = paths.tombstone(directory.name)
        if (directory / MANIFEST).exists() or not tombstone.exists():
            continue
        # A deleter that has just taken the manifest may still put it back; one that was killed
        # in between will not.
        is_decided = time.time() - tombstone.lstat().st_ctime > UNDECIDED_S
        if is_decided and not readers(directory):
            _take_away(paths, directory.name)
    for directory in paths.list_removing():
        shutil.rmtree(directory, ignore_errors=True)


def remove_torn(paths: RunPaths) -> int:
    """Remove saves of ended attempts that were never committed; returns the bytes freed.

    Nobody can finish them. One that changed within `UNDECIDED_S` is left alone all the same.
    """
    over = {a.number for a in load_history(paths).attempts if a.state.is_terminal}
    freed = 0
    for directory in paths.list_checkpoints():
        name = CheckpointName.parse(directory.name)
        if name is None or name.attempt not in over or (directory / MANIFEST).exists():
            continue
        try:
            status = [p.lstat() for p in (directory, *directory.rglob("*"))]
        except FileNotFoundError:
            continue  # Somebody is at work in it.
        if time.time() - max(one.st_mtime for one in status) > UNDECIDED_S:
            freed += sum(one.st_size for one in status)
            _take_away(paths, directory.name)
            shutil.rmtree(paths.removing(directory.name), ignore_errors=True)
    return freed


def _delete(paths: RunPaths, checkpoint: str, *, reason: str, by: str, writer: str) -> bool:
    """Journal, un-commit, look again, remove; False when it is another's, or kept after all."""
    directory, tombstone = paths.checkpoint(checkpoint), paths.tombstone(checkpoint)
    if readers(directory):
        return False
    facts = {"checkpoint": checkpoint, "reason": reason, "by": by}
    is_told = _tell(paths, writer, EventKind.CHECKPOINT_DELETED, **facts)
    make_directory(paths.tombstones)
    try:
        os.rename(directory / MANIFEST, tombstone)
    except FileNotFoundError:
        return False
    kept_by = _came_in_between(paths, checkpoint)
    if kept_by:
        os.rename(tombstone, directory / MANIFEST)
        fsync_directory(directory)
        text = f"{checkpoint} was not deleted: it is {kept_by}"
        _tell(paths, writer, EventKind.NOTE, text=text)
        return False
    for parent in (paths.tombstones, directory):
        fsync_directory(parent)
    _take_away(paths, checkpoint)
    shutil.rmtree(paths.removing(checkpoint), ignore_errors=True)
    fsync_directory(paths.checkpoints)
    if not is_told:
        # There was no room for the line: now there is.
        _tell(paths, writer, EventKind.CHECKPOINT_DELETED, **facts)
    return True


def _deleted_lately(paths: RunPaths) -> int:
    """Bytes of the checkpoints whose manifests became tombstones within `LATELY_S`."""
    freed = 0
    for tombstone in paths.tombstones.glob("*.json"):
        if time.time() - tombstone.lstat().st_ctime < LATELY_S:
            # A tombstone that cannot be read says nothing of its size.
            manifest = read_tombstone(tombstone)
            freed += manifest.bytes if manifest else 0
    return freed


def _came_in_between(paths: RunPaths, checkpoint: str) -> str:
    """The reader or pin that came after the verdict, or an empty string."""
    who = readers(paths.checkpoint(checkpoint))
    if who:
        return f"being read by {', '.join(who)}"
    return "pinned" if checkpoint in pinned_checkpoints(load_events(paths)) else ""


def _tell(paths: RunPaths, writer: str, kind: EventKind, **facts: Any) -> bool:
    """Journal a line; False when the disk is too full for it."""
    try:
        with JournalWriter(paths.journal_of(writer)) as journal:
            journal.append(kind, **facts)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return False
    return True


def _take_away(paths: RunPaths, checkpoint: str) -> None:
    """Take a directory out of the listing; harmless when another was faster."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(paths.checkpoint(checkpoint), paths.removing(checkpoint))
    fsync_directory(paths.checkpoints)
