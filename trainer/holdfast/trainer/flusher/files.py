"""Write the files of a staged step durably, then commit the step.

The order makes the commit safe against a power cut: bytes, fsync, rename, fsync of the directories,
and only then the manifest, which `commit` writes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.digests import FileChecksum
from holdfast.contracts.disk.direct import DirectFile
from holdfast.contracts.disk.durable import STORAGE_FULL, fsync_directory, make_directory
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import SaveError
from holdfast.trainer.flusher import commit
from holdfast.trainer.flusher.space_guard import Need, SpaceGuard, with_advice
from holdfast.trainer.placed import find_commit, is_saving_folder
from holdfast.trainer.slots.slot_table import FilePlace, SlotTable

WRITE_BYTES_MAX: Final = 8 * 1024 * 1024
WRITERS_MAX: Final = 4
# The longest delay until a lifted limit lets a writer continue.
LOOK_S: Final = 0.05

Pace = Callable[[int], None]
"""Called after so many bytes were written. It returns when the next ones may follow."""


def at_full_speed(_: int) -> None:
    """Wait for nothing: the pace of what is not limited."""


class WriteLimit:
    """`bytes_per_s` for all writers of a node together, or None without a limit."""

    def __init__(
        self, bytes_per_s: int | None, is_waited_for: Callable[[int], bool] = lambda _: False
    ) -> None:
        """`is_waited_for` is given a launch: True if nothing of it trains on this node."""
        self._bytes_per_s, self._is_waited_for = bytes_per_s, is_waited_for
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._lifted = (0, -1)

    def lift(self, launch: int, step: int) -> None:
        """Write this step and all before it at full speed, because training waits for it.

        A rank asks for it when it waits for a slot or for a commit, and before a save that is the
        last one or that a cloud's notice asks for.
        """
        self._lifted = max(self._lifted, (launch, step))

    def pace_of(self, launch: int, step: int) -> Pace:
        """Return the pace at which a step is written."""
        if self._bytes_per_s is None:
            return at_full_speed
        rate = self._bytes_per_s

        def is_lifted() -> bool:
            return (launch, step) <= self._lifted or self._is_waited_for(launch)

        def pace(count: int) -> None:
            if is_lifted():
                return
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + count / rate
                until = self._free_at
            while (left_s := until - time.monotonic()) > 0 and not is_lifted():
                time.sleep(min(left_s, LOOK_S))

        return pace


@dataclass(frozen=True)
class SlotImage:
    """One rank's sealed slot: its table, and the memory that the table's offsets refer to."""

    table: SlotTable
    data: memoryview


@dataclass(frozen=True)
class Committed:
    """A committed step. `flush_s` runs from the last seal to the last fsync of data."""

    step: int
    checkpoint: str
    bytes: int
    flush_s: float


def commit_step(
    images: Sequence[SlotImage],
    *,
    resumed: bool,
    peers: commit.PeerState,
    space_guard: SpaceGuard,
    pace: Pace = at_full_speed,
) -> Committed:
    """Write one step of this node and wait until it is committed.

    `resumed` means that an earlier flusher began the step, so some of its files may exist.
    `space_guard` checks for space before anything is written, `pace` limits how fast that is.
    `peers` is used while the step waits for other nodes. Raises `OSError` if storage fails and
    `SaveError` if the step cannot be committed. The directory then has no manifest and does not
    count as a checkpoint.
    """
    table = images[0].table
    run, directory = table.run, table.directory
    is_alone = table.nodes == 1
    # With several nodes, a temporary file may belong to a node that commits now.
    if resumed and is_alone:
        _remove_temporaries(directory)
    try:
        # Before anything is written: the step may be committed already, by a flusher that was
        # killed before it could report that.
        done = _refuse_or_accept_existing(run, directory, images, resumed)
    except OSError as error:
        _report_failure(directory, table, error, peers)
        raise
    if done is not None:
        return done
    written: list[Path] = []
    has_written = False
    try:
        entries = _write_with_retry(images, resumed, written, space_guard, pace)
        has_written = True
        part = _make_part(images, entries)
        if is_alone:
            manifest = commit.commit_alone(run, directory, part)
        else:
            manifest = commit.commit_together(run, directory, part, peers)
    except (OSError, SaveError) as error:
        # If the wait for other nodes failed, another node may still commit this node's files.
        if is_alone or not has_written:
            _discard(directory, images, written)
        _report_failure(directory, table, error, peers)
        raise
    return Committed(manifest.step, manifest.name, manifest.bytes, manifest.flush_s)


def write_for_lost(
    images: Sequence[SlotImage],
    expected: Sequence[FileEntry],
    *,
    peers: commit.PeerState,
    space_guard: SpaceGuard,
) -> None:
    """Write a lost node's files from copies of its slots, and leave its part for the commit.

    The bytes that were written must have the checksums in `expected`, which are the lost node's.
    Raises `OSError` and `SaveError`. The other nodes are then told that the part will not come.
    """
    table = images[0].table
    written: list[Path] = []
    try:
        # The lost node may have begun to write the same bytes.
        entries = _write_with_retry(images, True, written, space_guard)
        wrong = [one.path for one, right in zip(entries, expected, strict=True) if one != right]
        if wrong:
            raise SaveError(
                f"{table.checkpoint}: the copy of {wrong[0]} of node {table.node}, which is lost, "
                "was damaged while it was written. Nothing was committed"
            )
        commit.leave_part(peers.parts_in(table.directory), _make_part(images, entries))
    except (OSError, SaveError) as error:
        _discard(table.directory, images, written)
        parts = peers.parts_in(table.directory)
        commit.leave_failure(parts, table.node, str(error), for_all=False)
        raise
    peers.report()


def _report_failure(
    directory: Path, table: SlotTable, error: Exception, peers: commit.PeerState
) -> None:
    """Report to the other nodes, if any, that this node will not deliver the step."""
    if table.nodes > 1:
        for_all = table.node == commit.committer_of(table.nodes, peers.lost())
        parts = peers.parts_in(directory)
        commit.leave_failure(parts, table.node, str(error), for_all=for_all)
        peers.report()


def _write_with_retry(
    images: Sequence[SlotImage],
    resumed: bool,
    written: list[Path],
    space_guard: SpaceGuard,
    pace: Pace = at_full_speed,
) -> list[FileEntry]:
    """Write all files. If space runs out, try once more after the supervisor has freed some."""
    table = images[0].table
    need = Need.of_tables([image.table for image in images])

    def try_it() -> list[FileEntry]:
        space_guard.check(table.run, table.directory, need, node=table.node)
        _make_directories(table.run, table.directory)
        make_directory(table.files_directory)
        return _write_files(table.files_directory, images, resumed, written, pace)

    try:
        return try_it()
    except OSError as problem:
        if problem.errno not in STORAGE_FULL:
            raise
        # The partial step takes the space that the next try needs.
        _discard(table.directory, images, written)
        written.clear()
        freed, advice = space_guard.ask(need, problem)
        if not freed:
            raise with_advice(problem, advice) from problem
    try:
        return try_it()
    except OSError as problem:
        raise with_advice(problem, advice) from problem


def _make_directories(run: RunPaths, directory: Path) -> None:
    """Create the step's directory and make its name durable.

    Another process may have created the parent directories and died before their fsync.
    """
    make_directory(directory)
    parents = (run.checkpoints, run.directory)
    for parent in directory.parents[:2] if is_saving_folder(directory) else parents:
        # `fsync` of the two folders above: fault tests lost a commit whose folders another process
        # had created and not synced, see decision 14.
        fsync_directory(parent)


def _remove_temporaries(directory: Path) -> None:
    """Remove temporary manifest files that a killed flusher left.

    Call this only where no other node commits: its temporary file would still be needed.
    """
    with contextlib.suppress(OSError):
        for path in directory.glob(f".{MANIFEST}.*"):
            path.unlink()


def _discard(directory: Path, images: Sequence[SlotImage], written: Sequence[Path]) -> None:
    """Remove the files of a failed step, because the next step needs the space."""
    with contextlib.suppress(OSError):
        if (directory / MANIFEST).exists():
            # The manifest could not be removed, so the files that it lists stay too.
            return
        for path in written:
            path.unlink(missing_ok=True)
        if images[0].table.nodes > 1:
            # Another node may be about to write into the same folders.
            return
        for folder in sorted(_folders(directory, images), reverse=True):
            if folder.exists():
                folder.rmdir()


def _refuse_or_accept_existing(
    run: RunPaths, directory: Path, images: Sequence[SlotImage], resumed: bool
) -> Committed | None:
    """Return the commit that an earlier flusher finished, or None if the step is not committed."""
    manifest = find_commit(directory)
    if manifest is None:
        return None
    listed = {entry.path: entry.bytes for entry in manifest.files}
    ours = {f.path: f.bytes for image in images for f in image.table.files}
    if not resumed or any(listed.get(path) != size for path, size in ours.items()):
        raise SaveError(
            f"{directory} is already a committed checkpoint and is never overwritten. Two "
            "programs must not write the same attempt and launch of a run"
        )
    commit.accept_commit(run, directory, is_alone=images[0].table.nodes == 1)
    return Committed(manifest.step, manifest.name, manifest.bytes, manifest.flush_s)


def _write_files(
    directory: Path,
    images: Sequence[SlotImage],
    resumed: bool,
    written: list[Path],
    pace: Pace,
) -> list[FileEntry]:
    """Write every file of every image, up to `WRITERS_MAX` in parallel, and fsync the folders.

    Each finished file is added to `written`, even if the function fails later.
    """
    work = [(image, file) for image in images for file in image.table.files]
    parents = sorted(_folders(directory, images))
    for parent in parents:
        make_directory(parent)

    def write(item: tuple[SlotImage, FilePlace]) -> FileEntry:
        image, file = item
        path = directory / file.path
        with image.data[file.offset : file.offset + file.bytes] as content:
            checksum = write_file(path, content, replace=resumed, pace=pace)
            written.append(path)
        return FileEntry.of(file.path, file.bytes, checksum)

    with ThreadPoolExecutor(WRITERS_MAX, thread_name_prefix="write") as pool:
        entries = list(pool.map(write, work))
    # The renames must be durable before the manifest lists the files.
    for parent in parents:
        fsync_directory(parent)
    return entries


def write_file(
    path: Path, content: memoryview, *, replace: bool, pace: Pace = at_full_speed
) -> FileChecksum:
    """Write `path` durably through a temporary file and return the checksum of its bytes."""
    if not replace and path.exists():
        raise SaveError(
            f"{path} already exists and is never overwritten. Two programs must not write the "
            "same attempt and launch of a run"
        )
    checksum = FileChecksum(len(content))
    temporary = path.with_name(f"{path.name}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        # The slot is aligned to pages and does not change meanwhile, so direct writes are possible,
        # see decision 16.
        output = DirectFile(handle, len(content))
        for start in range(0, len(content), WRITE_BYTES_MAX):
            piece = content[start : start + WRITE_BYTES_MAX]
            # Small pieces, so that the checksum and the write find the bytes in the processor's
            # cache.
            checksum.update(piece)
            output.write(piece)
            pace(len(piece))
        # The bytes before the name: after a power cut, a file with its final name is whole.
        os.fsync(handle)
        os.rename(temporary, path)
    except OSError as error:
        # A partial file would only use space that the next save may need.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, f"{error.strerror}: {path}") from error
    finally:
        os.close(handle)
    return checksum


def _folders(directory: Path, images: Sequence[SlotImage]) -> set[Path]:
    """Return the folders of these images' files, including the checkpoint's own."""
    paths = (directory / file.path for image in images for file in image.table.files)
    return {directory, *(path.parent for path in paths)}


def _make_part(images: Sequence[SlotImage], entries: Sequence[FileEntry]) -> dict[str, Any]:
    """Return this node's part of the manifest. `manifest` comes from rank 0's table."""
    tables = [image.table for image in images]
    return {
        "node": tables[0].node,
        "nodes": tables[0].nodes,
        "world_size": tables[0].world_size,
        "ranks": sorted(table.rank for table in tables),
        "files": [entry.model_dump(mode="json") for entry in entries],
        "blocked_s": max(table.blocked_s for table in tables),
        "staged_at": max(table.staged_at for table in tables),
        "fsynced_at": time.time(),
        "manifest": next((t.manifest for t in tables if t.manifest is not None), None),
    }
