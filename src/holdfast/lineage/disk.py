"""Reads a run's folder for the index: its checkpoints and fingerprint.

A folder may change while it is read. Therefore the survey, which computes the fingerprint, comes
first: a change after it gives another fingerprint at the next ingest.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.digests import document_digest
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.manifest import Manifest, read_manifest, read_tombstone
from holdfast.contracts.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.lineage.states import INTEGER_MAX

Row = dict[str, Any]

_METRICS: Final = re.compile(r"a([0-9]{4,9})\.l([0-9]{2,9})")

# About ten million lines.
METRICS_BYTES_MAX: Final = 1 << 30
# Increase this when rows are built differently, so that every run is ingested again.
INGEST_VERSION: Final = 3
# The columns that come from the manifest. The others come from the name and the journals.
FACTS: Final = (
    *("reason", "world_size", "parent", "bytes", "files", "checksum", "command_digest"),
    *("blocked_s", "flush_s", "staged_at", "committed_at", "metrics", "detail"),
    *("versions", "topology"),
)

# (path, bytes, checksum) of each file, in the manifest's order.
FileFacts = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class CommitRecord:
    """A manifest or a tombstone, with its size and time from before it was read (`stamp`)."""

    name: CheckpointName
    path: str
    stamp: str
    is_deleted: bool


@dataclass(frozen=True)
class Survey:
    """The result of one survey of a run's folder.

    The fingerprint changes with every file from which rows are built.
    """

    fingerprint: str
    records: tuple[CommitRecord, ...]


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint with a manifest or a tombstone; `facts` has the columns in `FACTS`.

    `files` is None if the manifest has not changed since the last ingest.
    """

    name: CheckpointName
    facts: Row
    stamp: str
    is_deleted: bool
    files: FileFacts | None = ()


def survey(paths: RunPaths) -> Survey:
    """Survey the files from which rows are built, by `stat` alone.

    A directory without a manifest is not a checkpoint and is ignored.
    """
    base = len(f"{paths.directory}/")
    seen: list[tuple[str, str]] = []
    records: dict[CheckpointName, CommitRecord] = {}

    def look(path: str) -> str:
        stamp = _stamp(path)
        if stamp:
            seen.append((path[base:], stamp))
        return stamp

    for path in _documents(paths):
        look(path)
    for tombstone in sorted(paths.tombstones.glob("*.json")):
        name, stamp = CheckpointName.parse(tombstone.stem), look(str(tombstone))
        if name and stamp:
            records[name] = CommitRecord(name, str(tombstone), stamp, True)
    folder = str(paths.checkpoints)
    for name in paths.list_checkpoint_names():
        path = f"{folder}/{name}/{MANIFEST}"
        # A manifest commits: while it exists, the checkpoint is not deleted, despite a tombstone.
        if stamp := look(path):
            records[name] = CommitRecord(name, path, stamp, False)
    return Survey(
        f"{INGEST_VERSION}:{document_digest([str(paths.directory), seen])}",
        tuple(one for one in records.values() if one.name.step <= INTEGER_MAX),
    )


def version_of(fingerprint: str) -> int:
    """Return the `INGEST_VERSION` in a fingerprint, or 0 if it has none."""
    version, colon, _ = fingerprint.partition(":")
    return int(version) if colon and version.isdecimal() else 0


def is_same_state(stored: str, seen: str) -> bool:
    """Return True if both have the same content and the stored version is not older."""
    return (
        version_of(stored) >= version_of(seen)
        and stored.partition(":")[2] == seen.partition(":")[2]
    )


def read_checkpoints(
    records: Sequence[CommitRecord], known: Mapping[str, Row]
) -> list[FoundCheckpoint]:
    """Return every checkpoint that has a manifest or a tombstone, sorted by step.

    `known` has the rows of an earlier ingest by name. A manifest that has not changed since then
    is not read again.
    """
    found = [_found(one, known) for one in records]
    return sorted(found, key=lambda one: (one.name.step, one.name.attempt, one.name.launch))


def list_metrics(paths: RunPaths) -> dict[tuple[int, int], Path]:
    """Return the metrics files by (attempt, launch)."""
    found = {}
    for path in paths.metrics.glob("*.jsonl"):
        match = _METRICS.fullmatch(path.stem)
        if match and _is_plausible(path):
            found[int(match[1]), int(match[2])] = path
    return found


def _is_plausible(path: Path) -> bool:
    """Return True for a regular file of plausible size, which excludes links and pipes."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_size <= METRICS_BYTES_MAX


def empty_facts(detail: str | None) -> Row:
    """Return the facts of a checkpoint without a valid manifest."""
    documents: Row = {"metrics": {}, "versions": {}, "topology": {}}
    return {**dict.fromkeys(FACTS), **documents, "detail": detail}


def _found(record: CommitRecord, known: Mapping[str, Row]) -> FoundCheckpoint:
    """Return a checkpoint, from its unchanged row in `known` or from its manifest or tombstone."""
    name, is_deleted = record.name, record.is_deleted
    stamp = f"{'deleted' if is_deleted else 'there'} {record.stamp}"
    row = known.get(str(name)) if known else None
    if row and row["stamp"] == stamp:
        facts = {column: row[column] for column in FACTS}
        # If the row has a checksum, the manifest was valid and the detail came from a journal.
        facts["detail"] = None if row["checksum"] else row["detail"]
        return FoundCheckpoint(
            name=name, facts=facts, stamp=stamp, is_deleted=is_deleted, files=None
        )
    path = record.path
    content = _read_tombstone(path) if is_deleted else _read(path.removesuffix(f"/{MANIFEST}"))
    if isinstance(content, str):
        return FoundCheckpoint(
            name=name, facts=empty_facts(content), stamp=stamp, is_deleted=is_deleted
        )
    return FoundCheckpoint(
        name=name,
        facts=_facts(content),
        stamp=stamp,
        is_deleted=is_deleted,
        files=tuple((one.path, one.bytes, one.checksum) for one in content.files),
    )


def _read(directory: str) -> Manifest | str:
    """Return the manifest in a directory, or the reason why it is invalid."""
    try:
        manifest = read_manifest(Path(directory))
    except DamagedCheckpointError as error:
        return "; ".join(error.damaged) or str(error)
    except OSError as error:
        return f"{MANIFEST}: cannot be read: {error.strerror}"
    return manifest or f"{MANIFEST}: deleted while it was read"


def _read_tombstone(path: str) -> Manifest | str:
    return read_tombstone(Path(path)) or "its manifest could not be read"


def _facts(manifest: Manifest) -> Row:
    return {
        "reason": manifest.reason,
        "world_size": manifest.world_size,
        "parent": manifest.parent,
        "bytes": manifest.bytes,
        "files": len(manifest.files),
        "checksum": manifest.checksum,
        "command_digest": manifest.command_digest or None,
        "blocked_s": _finite(manifest.blocked_s),
        "flush_s": _finite(manifest.flush_s),
        "staged_at": _finite(manifest.staged_at) or None,
        "committed_at": _finite(manifest.committed_at),
        "metrics": dict(manifest.metrics),
        "versions": dict(manifest.versions),
        "topology": manifest.topology,
        "detail": None,
    }


def _finite(value: float) -> float | None:
    """Return `value`, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def _documents(paths: RunPaths) -> Iterator[str]:
    """Yield every file from which rows are built, except manifests and tombstones."""
    yield str(paths.spec)
    yield from map(str, paths.list_journals())
    for attempt in paths.list_attempts():
        yield str(attempt.directory)
        own = (attempt.request, attempt.submission, attempt.claim, attempt.outcome)
        yield from map(str, own)


def _stamp(path: str) -> str:
    """Return the size and modification time of a file; empty if it does not exist."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    # The time of a directory changes with unrelated files, so record only that it exists.
    return "directory" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} {status.st_mtime_ns}"
