"""Making a staged step durable: each file once, then the manifest, then `latest`.

The order is what a power cut may not break: bytes, fsync, rename, fsync of the directories, and
only then the manifest. With several nodes each leaves a part file; node 0 writes the manifest
when all parts are there, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.digests import FileChecksum
from holdfast.contracts.durable import (
    create_bytes,
    fsync_directory,
    make_directory,
    to_json,
    write_bytes,
)
from holdfast.contracts.errors import SaveError
from holdfast.contracts.manifest import FileEntry, Manifest, read_manifest
from holdfast.contracts.paths import MANIFEST, PARTS, CheckpointName, RunPaths

WRITE_BYTES_MAX: Final = 8 * 1024 * 1024
WRITERS_MAX: Final = 4
PEERS_WAIT_S: Final = 1800.0
POLL_S: Final = 0.002
POLL_SLOW_S: Final = 0.05
OVERTAKEN_CHECK_S: Final = 0.5
FAILED_PART: Final = "failed.json"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_PART = re.compile(r"node-(\d{4,})\.json")


@dataclass(frozen=True)
class Image:
    """One rank's sealed slot: its table, and the memory that the table's offsets count in."""

    table: dict[str, Any]
    data: memoryview


@dataclass(frozen=True)
class Committed:
    """What became durable; `flush_s` is from the last seal to the last data fsync."""

    step: int
    checkpoint: str
    bytes: int
    flush_s: float


def commit_step(
    images: Sequence[Image], *, resumed: bool, abandoned: Callable[[], str | None]
) -> Committed:
    """Write one step of this node and see it committed.

    `resumed` says that a flusher before this one had begun it, so that its files may be there.
    `abandoned` is asked while waiting for other nodes; a reason ends the wait. Raises `OSError`
    when storage refuses and `SaveError` when the step cannot be committed; the directory then
    stays without a manifest, which is to say it does not count.
    """
    table = images[0].table
    run = RunPaths(Path(table["run_directory"]))
    directory = run.checkpoint(table["checkpoint"])
    done = _refuse_or_accept_existing(directory, images, resumed)
    if done is not None:
        return done
    try:
        make_directory(directory)
        entries = _write_files(directory, images, resumed)
        part = _make_part(images, entries)
        if table["nodes"] == 1:
            manifest = _write_manifest(run, directory, [part])
        else:
            manifest = _commit_together(run, directory, part, abandoned)
    except (OSError, SaveError) as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _make_room(directory, images)
        if table["nodes"] > 1:
            leave_failure(directory, table["node"], str(error))
        raise
    return Committed(manifest.step, manifest.name, manifest.bytes, manifest.flush_s)


def _make_room(directory: Path, images: Sequence[Image]) -> None:
    """Remove this node's files of a step that storage had no room for: the next one needs it."""
    for image in images:
        for file in _files(image):
            with contextlib.suppress(OSError):
                (directory / file["path"]).unlink(missing_ok=True)


def leave_failure(directory: Path, node: int, reason: str) -> None:
    """Tell the other nodes that this one will not deliver the step; best effort by nature.

    Where storage is full even this may fail, and the others then find out by waiting.
    """
    names = [_part_name(node)] + ([FAILED_PART] if node == 0 else [])
    with contextlib.suppress(OSError):
        make_directory(directory / PARTS)
        for name in names:
            write_bytes(directory / PARTS / name, to_json({"node": node, "error": reason}))


def _refuse_or_accept_existing(
    directory: Path, images: Sequence[Image], resumed: bool
) -> Committed | None:
    """None when the way is free; the commit itself when a flusher before us had finished it."""
    manifest = read_manifest(directory)
    if manifest is None:
        return None
    listed = {entry.path: entry.bytes for entry in manifest.files}
    ours = {f["path"]: f["bytes"] for image in images for f in image.table["files"]}
    if not resumed or any(listed.get(path) != size for path, size in ours.items()):
        raise SaveError(
            f"{directory} is a committed checkpoint already and is never overwritten; two "
            "programs must not write the same attempt and incarnation of a run"
        )
    fsync_directory(directory)
    return Committed(manifest.step, manifest.name, manifest.bytes, manifest.flush_s)


def _write_files(directory: Path, images: Sequence[Image], resumed: bool) -> list[FileEntry]:
    """Write every file of every image, at most `WRITERS_MAX` at once, and fsync all names."""
    work = [(image, f["path"], f["offset"], f["bytes"]) for image in images for f in _files(image)]
    parents = {(directory / path).parent for _, path, _, _ in work} | {directory}
    for parent in sorted(parents):
        make_directory(parent)

    def write(item: tuple[Image, str, int, int]) -> FileEntry:
        image, path, offset, size = item
        with image.data[offset : offset + size] as content:
            checksum = _write_file(directory / path, content, replace=resumed)
        return FileEntry.of(path, size, checksum)

    with ThreadPoolExecutor(WRITERS_MAX, thread_name_prefix="write") as pool:
        entries = list(pool.map(write, work))
    for parent in sorted(parents):
        fsync_directory(parent)
    return entries


def _write_file(path: Path, content: memoryview, *, replace: bool) -> FileChecksum:
    """Write `path` durably under a name of its own first; returns what its bytes sum to."""
    if not replace and path.exists():
        raise SaveError(
            f"{path} exists already and is never overwritten; two programs must not write the "
            "same attempt and incarnation of a run"
        )
    checksum = FileChecksum(len(content))
    temporary = path.with_name(f"{path.name}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for start in range(0, len(content), WRITE_BYTES_MAX):
            piece = content[start : start + WRITE_BYTES_MAX]
            checksum.update(piece)
            while piece:
                piece = piece[os.write(handle, piece) :]
        os.fsync(handle)
    except OSError as error:
        # What is half-written only takes room that the next save may need.
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}: {path}") from error
    finally:
        os.close(handle)
    os.rename(temporary, path)
    return checksum


def _files(image: Image) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = image.table["files"]
    return files


def _make_part(images: Sequence[Image], entries: Sequence[FileEntry]) -> dict[str, Any]:
    """What this node has to say for the manifest; `manifest` comes from rank 0's table."""
    tables = [image.table for image in images]
    return {
        "node": tables[0]["node"],
        "nodes": tables[0]["nodes"],
        "world_size": tables[0]["world_size"],
        "ranks": sorted(table["rank"] for table in tables),
        "files": [entry.model_dump(mode="json") for entry in entries],
        "blocked_s": max(table["blocked_s"] for table in tables),
        "staged_at": max(table["staged_at"] for table in tables),
        "fsynced_at": time.time(),
        "manifest": next((t["manifest"] for t in tables if "manifest" in t), None),
    }


def _write_manifest(run: RunPaths, directory: Path, parts: Sequence[dict[str, Any]]) -> Manifest:
    """Commit: the manifest, durable under its own name. Raises `SaveError` if a rank is absent."""
    ranks = sorted(rank for part in parts for rank in part["ranks"])
    world_size = parts[0]["world_size"]
    facts = next((part["manifest"] for part in parts if part["manifest"]), None)
    if ranks != list(range(world_size)) or facts is None:
        raise SaveError(
            f"{directory.name}: ranks {ranks} were staged, expected 0 to {world_size - 1}; "
            "every rank must save the same step"
        )
    staged_at = max(part["staged_at"] for part in parts)
    manifest = Manifest(
        **facts,
        files=tuple(FileEntry(**f) for part in parts for f in part["files"]),
        blocked_s=max(part["blocked_s"] for part in parts),
        flush_s=max(0.0, max(part["fsynced_at"] for part in parts) - staged_at),
        staged_at=staged_at,
        committed_at=time.time(),
    )
    content = to_json(manifest.model_dump(mode="json"))
    if not create_bytes(directory / MANIFEST, content):
        raise SaveError(f"{directory}: somebody else committed it meanwhile; nothing was replaced")
    _move_latest(run, directory.name)
    shutil.rmtree(directory / PARTS, ignore_errors=True)
    return manifest


def _move_latest(run: RunPaths, name: str) -> None:
    """Point `latest` at the newest commit, for people; resume never reads it."""
    temporary = run.checkpoints / f".latest.{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)
        os.replace(temporary, run.latest)
    except OSError as error:
        print(f"holdfast flusher: {name} is committed, `latest` stays: {error}", file=sys.stderr)


def _commit_together(
    run: RunPaths, directory: Path, part: dict[str, Any], abandoned: Callable[[], str | None]
) -> Manifest:
    """Leave this node's part; node 0 then commits, the others wait until it has."""
    make_directory(directory / PARTS)
    write_bytes(directory / PARTS / _part_name(part["node"]), to_json(part))
    wait = _Wait(run, directory, abandoned)
    if part["node"] == 0:
        return _write_manifest(run, directory, wait.for_parts(part["nodes"]))
    return wait.for_manifest()


class _Wait:
    """Bounded waits for other nodes, by looking at the shared directory."""

    def __init__(self, run: RunPaths, directory: Path, abandoned: Callable[[], str | None]) -> None:
        self._run, self._directory, self._abandoned = run, directory, abandoned
        self._began = self._checked = time.monotonic()

    def for_parts(self, nodes: int) -> list[dict[str, Any]]:
        """Every node's part, in order of node; `SaveError` when one cannot or will not come."""
        parts: dict[int, dict[str, Any]] = {}
        while len(parts) < nodes:
            for name in os.listdir(self._directory / PARTS):
                match = _PART.fullmatch(name)
                if match and int(match[1]) not in parts:
                    part = json.loads((self._directory / PARTS / name).read_bytes())
                    if "error" in part:
                        raise SaveError(f"node {part['node']}: {part['error']}")
                    parts[int(match[1])] = part
            missing = sorted(set(range(nodes)) - set(parts))
            if missing:
                self._pause(missing)
        return [parts[node] for node in sorted(parts)]

    def for_manifest(self) -> Manifest:
        """Node 0's manifest; `SaveError` when it said, or shows, that there will be none."""
        while True:
            manifest = read_manifest(self._directory)
            if manifest is not None:
                return manifest
            with contextlib.suppress(FileNotFoundError):
                failed = json.loads((self._directory / PARTS / FAILED_PART).read_bytes())
                raise SaveError(f"node {failed['node']}: {failed['error']}")
            self._pause([0])

    def _pause(self, missing: Sequence[int]) -> None:
        now = time.monotonic()
        waited = now - self._began
        if waited > PEERS_WAIT_S:
            raise SaveError(
                f"{self._directory.name}: nothing from nodes {list(missing)} within "
                f"{PEERS_WAIT_S:.0f} s; expected their parts on the shared directory"
            )
        if reason := self._abandoned():
            raise SaveError(f"{self._directory.name}: {reason}")
        if now - self._checked > OVERTAKEN_CHECK_S:
            self._checked = now
            overtaken = [node for node in missing if self._is_overtaken(node)]
            if overtaken:
                raise SaveError(
                    f"{self._directory.name}: nodes {overtaken} went on to a later step without it"
                )
        time.sleep(POLL_S if waited < 1.0 else POLL_SLOW_S)

    def _is_overtaken(self, node: int) -> bool:
        """True when `node` has left a part for a later step: it writes steps in order."""
        own = CheckpointName.parse(self._directory.name)
        for other in self._run.list_checkpoints():
            name = CheckpointName.parse(other.name)
            if own is None or name is None or name <= own:
                continue
            same_writer = (name.attempt, name.incarnation) == (own.attempt, own.incarnation)
            if same_writer and (other / PARTS / _part_name(node)).exists():
                return True
        return False


def _part_name(node: int) -> str:
    return f"node-{node:04d}.json"
