"""What a run's folder holds for the index: its checkpoints, its journal lines, its fingerprint.

Reads, and decides nothing. A folder may change while it is read; the fingerprint is therefore
taken first, so that whatever changed after it is seen the next time.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from holdfast.contracts.digests import document_digest
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.journal import Event, read_journal
from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.contracts.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.lineage.models import INTEGER_MAX

Row = dict[str, Any]

_METRICS: Final = re.compile(r"a([0-9]{4,9})\.i([0-9]{2,9})")

# Counted up when rows are built in another way, so that every run is read again.
INGEST_VERSION: Final = 2
# What a manifest alone says of a checkpoint; the rest of its row comes from name and journals.
FACTS: Final = (
    *("reason", "world_size", "parent", "bytes", "files", "checksum", "command_digest"),
    *("blocked_s", "flush_s", "staged_at", "committed_at", "metrics", "detail"),
    *("versions", "topology"),
)

# (path, bytes, checksum) of each file, in the manifest's order.
FileFacts = tuple[tuple[str, int, str], ...]


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


def take_fingerprint(paths: RunPaths) -> str:
    """A digest that changes when anything in the folder that rows are built from changes."""
    base = f"{paths.directory}/"
    seen: list[tuple[str, str]] = []
    for path in _sources(paths):
        stamp = _stamp(path)
        if stamp:
            seen.append((path.removeprefix(base), stamp))
    return document_digest([INGEST_VERSION, str(paths.directory), seen])


def read_checkpoints(paths: RunPaths, known: Mapping[str, Row]) -> list[FoundCheckpoint]:
    """Every checkpoint that was ever committed here and left a manifest or a tombstone.

    `known` are rows from an earlier reading, by name: a manifest that has not changed since is
    not read again. A directory without a manifest is no checkpoint and is passed over.
    """
    found: dict[str, FoundCheckpoint] = {}
    for path in sorted(paths.tombstones.glob("*.json")):
        name = CheckpointName.parse(path.stem)
        stamp = _stamp(str(path))
        if name and stamp and name.step <= INTEGER_MAX:
            found[path.stem] = _found(name, path, known.get(path.stem), stamp, is_deleted=True)
    for name, manifest in _manifests(paths):
        stamp = _stamp(manifest)
        # The manifest is what commits: while it stands, a deletion was not carried through.
        if stamp and name.step <= INTEGER_MAX:
            own = str(name)
            found[own] = _found(name, Path(manifest), known.get(own), stamp, is_deleted=False)
    return sorted(
        found.values(), key=lambda one: (one.name.step, one.name.attempt, one.name.incarnation)
    )


def read_lines(paths: RunPaths) -> list[JournalLines]:
    """Every journal of the run with all its whole lines, in the order that they lie there."""
    lines = []
    for path in paths.list_journals():
        inside = path.relative_to(paths.directory)
        is_attempts = inside.parts[0] == paths.attempts.name
        lines.append(
            JournalLines(
                journal=inside.as_posix(),
                attempt=int(inside.parts[1]) if is_attempts else None,
                events=tuple(read_journal(path)[0]),
            )
        )
    return lines


def list_metrics(paths: RunPaths) -> dict[tuple[int, int], Path]:
    """The files of logged metrics by (attempt, incarnation)."""
    found = {}
    for path in paths.metrics.glob("*.jsonl"):
        match = _METRICS.fullmatch(path.stem)
        if match and path.is_file():
            found[int(match[1]), int(match[2])] = path
    return found


def empty_facts(detail: str | None) -> Row:
    """The facts of a checkpoint whose manifest says nothing that can be believed."""
    documents: Row = {"metrics": {}, "versions": {}, "topology": {}}
    return {**dict.fromkeys(FACTS), **documents, "detail": detail}


def _found(
    name: CheckpointName, path: Path, row: Row | None, stamp: str, *, is_deleted: bool
) -> FoundCheckpoint:
    """What lies at `path`, or what `row` says of it when that was written of the same file."""
    stamp = f"{'deleted' if is_deleted else 'there'} {stamp}"
    if row and row["stamp"] == stamp:
        facts = {column: row[column] for column in FACTS}
        # With a checksum the manifest was believed, and the detail came from a journal.
        facts["detail"] = None if row["checksum"] else row["detail"]
        return FoundCheckpoint(
            name=name, facts=facts, stamp=stamp, is_deleted=is_deleted, files=None
        )
    said = _read_tombstone(path) if is_deleted else _read(path.parent)
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


def _read(directory: Path) -> Manifest | str:
    """The manifest in a directory, or why it cannot be believed."""
    try:
        manifest = read_manifest(directory)
    except DamagedCheckpointError as error:
        return "; ".join(error.damaged) or str(error)
    except OSError as error:
        return f"{MANIFEST}: cannot be read: {error.strerror}"
    return manifest or f"{MANIFEST}: gone while it was read"


def _read_tombstone(path: Path) -> Manifest | str:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (ValidationError, OSError):
        return "its manifest could not be read"


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


def _manifests(paths: RunPaths) -> Iterator[tuple[CheckpointName, str]]:
    """Every checkpoint's name and where its manifest lies: text, for there may be many."""
    base = str(paths.checkpoints)
    for name in paths.list_checkpoint_names():
        yield name, f"{base}/{name}/{MANIFEST}"


def _sources(paths: RunPaths) -> Iterator[str]:
    """Every file that rows are built from."""
    yield str(paths.spec)
    yield from map(str, paths.list_journals())
    for attempt in paths.list_attempts():
        yield str(attempt.directory)
        own = (attempt.request, attempt.submission, attempt.claim, attempt.outcome)
        yield from map(str, own)
    yield from map(str, sorted(paths.tombstones.glob("*.json")))
    yield from (manifest for _, manifest in _manifests(paths))


def _stamp(path: str) -> str:
    """Size and time of the last change, empty when there is no such file."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    # A directory's time and size say what lies beside our files; that it exists is enough.
    return "directory" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} {status.st_mtime_ns}"
