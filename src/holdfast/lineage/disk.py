"""What a run's folder holds for the index: its checkpoints, its journal lines, its fingerprint.

Reads, and decides nothing. A folder may change while it is read; the survey is therefore made
first, so that whatever changed after it is seen the next time.
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
from holdfast.contracts.journal import Event
from holdfast.contracts.journal_cache import KEPT
from holdfast.contracts.manifest import Manifest, read_manifest, read_tombstone
from holdfast.contracts.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.lineage.models import INTEGER_MAX

Row = dict[str, Any]

_METRICS: Final = re.compile(r"a([0-9]{4,9})\.l([0-9]{2,9})")

# Ten million lines.
METRICS_BYTES_MAX: Final = 1 << 30
# Counted up when rows are built in another way, so that every run is read again.
INGEST_VERSION: Final = 3
# What a manifest alone says of a checkpoint; the rest of its row comes from name and journals.
FACTS: Final = (
    *("reason", "world_size", "parent", "bytes", "files", "checksum", "command_digest"),
    *("blocked_s", "flush_s", "staged_at", "committed_at", "metrics", "detail"),
    *("versions", "topology"),
)

# (path, bytes, checksum) of each file, in the manifest's order.
FileFacts = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class CommitRecord:
    """A manifest or a tombstone, and its size and time when it was seen, before it was read."""

    name: CheckpointName
    path: str
    stamp: str
    is_deleted: bool


@dataclass(frozen=True)
class Survey:
    """What was seen in a run's folder at one look.

    The fingerprint changes when anything in the folder that rows are built from changes.
    """

    fingerprint: str
    records: tuple[CommitRecord, ...]


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint that has a manifest, or had one: `facts` are the columns of `FACTS`.

    `files` is None where the manifest has not changed since it was read before.
    """

    name: CheckpointName
    facts: Row
    stamp: str
    is_deleted: bool
    files: FileFacts | None = ()


@dataclass(frozen=True, kw_only=True)
class JournalLines:
    """All whole lines of one journal; `attempt` when it is an attempt's own."""

    journal: str
    attempt: int | None
    events: tuple[Event, ...]


def survey(paths: RunPaths) -> Survey:
    """Look at everything in the folder that rows are built from, and read none of it.

    A directory without a manifest is no checkpoint and is passed over.
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
        # The manifest is what commits: while it stands, a deletion was not carried through.
        if stamp := look(path):
            records[name] = CommitRecord(name, path, stamp, False)
    return Survey(
        f"{INGEST_VERSION}:{document_digest([str(paths.directory), seen])}",
        tuple(one for one in records.values() if one.name.step <= INTEGER_MAX),
    )


def version_of(fingerprint: str) -> int:
    """The `INGEST_VERSION` of the program that made a fingerprint, 0 when it does not say."""
    version, colon, _ = fingerprint.partition(":")
    return int(version) if colon and version.isdigit() else 0


def is_same_state(stored: str, seen: str) -> bool:
    """True when both tell of the same folder, and the stored one's program knew as much."""
    return (
        version_of(stored) >= version_of(seen)
        and stored.partition(":")[2] == seen.partition(":")[2]
    )


def read_checkpoints(
    records: Sequence[CommitRecord], known: Mapping[str, Row]
) -> list[FoundCheckpoint]:
    """Every checkpoint that was ever committed here and left a manifest or a tombstone.

    `known` are rows from an earlier reading, by name: a manifest that has not changed since is
    not read again.
    """
    found = [_found(one, known) for one in records]
    return sorted(found, key=lambda one: (one.name.step, one.name.attempt, one.name.launch))


def read_lines(paths: RunPaths, *, fresh: bool = False) -> list[JournalLines]:
    """Every journal of the run with all its whole lines, in the order that they lie there.

    Of journals that this process has read before, only what was added is read, unless `fresh`.
    """
    lines = []
    for path in paths.list_journals():
        if fresh:
            KEPT.forget(path)
        inside = path.relative_to(paths.directory)
        is_attempts = inside.parts[0] == paths.attempts.name
        lines.append(
            JournalLines(
                journal=inside.as_posix(),
                attempt=int(inside.parts[1]) if is_attempts else None,
                events=KEPT.read(path),
            )
        )
    return lines


def list_metrics(paths: RunPaths) -> dict[tuple[int, int], Path]:
    """The files of logged metrics by (attempt, launch)."""
    found = {}
    for path in paths.metrics.glob("*.jsonl"):
        match = _METRICS.fullmatch(path.stem)
        if match and _is_plausible(path):
            found[int(match[1]), int(match[2])] = path
    return found


def _is_plausible(path: Path) -> bool:
    """False for what is no file of metrics whatever its name: a link, a pipe, a huge file."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_size <= METRICS_BYTES_MAX


def empty_facts(detail: str | None) -> Row:
    """The facts of a checkpoint whose manifest says nothing that can be believed."""
    documents: Row = {"metrics": {}, "versions": {}, "topology": {}}
    return {**dict.fromkeys(FACTS), **documents, "detail": detail}


def _found(record: CommitRecord, known: Mapping[str, Row]) -> FoundCheckpoint:
    """What a record says, or what was known of it where that was read from the same file."""
    name, is_deleted = record.name, record.is_deleted
    stamp = f"{'deleted' if is_deleted else 'there'} {record.stamp}"
    row = known.get(str(name)) if known else None
    if row and row["stamp"] == stamp:
        facts = {column: row[column] for column in FACTS}
        # With a checksum the manifest was believed, and the detail came from a journal.
        facts["detail"] = None if row["checksum"] else row["detail"]
        return FoundCheckpoint(
            name=name, facts=facts, stamp=stamp, is_deleted=is_deleted, files=None
        )
    path = record.path
    said = _read_tombstone(path) if is_deleted else _read(path.removesuffix(f"/{MANIFEST}"))
    if isinstance(said, str):
        return FoundCheckpoint(
            name=name, facts=empty_facts(said), stamp=stamp, is_deleted=is_deleted
        )
    return FoundCheckpoint(
        name=name,
        facts=_facts(said),
        stamp=stamp,
        is_deleted=is_deleted,
        files=tuple((one.path, one.bytes, one.checksum) for one in said.files),
    )


def _read(directory: str) -> Manifest | str:
    """The manifest in a directory, or why it cannot be believed."""
    try:
        manifest = read_manifest(Path(directory))
    except DamagedCheckpointError as error:
        return "; ".join(error.damaged) or str(error)
    except OSError as error:
        return f"{MANIFEST}: cannot be read: {error.strerror}"
    return manifest or f"{MANIFEST}: gone while it was read"


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
    """`value` unless it is one of the floats that JSON does not have."""
    return value if math.isfinite(value) else None


def _documents(paths: RunPaths) -> Iterator[str]:
    """Every file that rows are built from, but those that stand for one checkpoint."""
    yield str(paths.spec)
    yield from map(str, paths.list_journals())
    for attempt in paths.list_attempts():
        yield str(attempt.directory)
        own = (attempt.request, attempt.submission, attempt.claim, attempt.outcome)
        yield from map(str, own)


def _stamp(path: str) -> str:
    """Size and time of the last change, empty when there is no such file."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    # A directory's time and size say what lies beside our files; that it exists is enough.
    return "directory" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} {status.st_mtime_ns}"
