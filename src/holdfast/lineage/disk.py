"""What a run's folder holds for the index: its checkpoints, its journal lines, its fingerprint.

Reads, and decides nothing. A folder may change while it is read; the fingerprint is therefore
taken first, so that whatever changed after it is seen the next time.
"""

from __future__ import annotations

import math
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

# Counted up when rows are built in another way, so that every run is read again.
INGEST_VERSION: Final = 1
# What a manifest alone says of a checkpoint; the rest of its row comes from name and journals.
FACTS: Final = (
    *("reason", "world_size", "parent", "bytes", "files", "checksum", "command_digest"),
    *("blocked_s", "flush_s", "staged_at", "committed_at", "metrics", "detail"),
)


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint that has a manifest, or had one: `facts` are the columns of `FACTS`."""

    name: CheckpointName
    facts: Row
    stamp: str
    is_deleted: bool


@dataclass(frozen=True, kw_only=True)
class JournalLines:
    """All whole lines of one journal; `attempt` when it is an attempt's own."""

    journal: str
    attempt: int | None
    events: tuple[Event, ...]


def take_fingerprint(paths: RunPaths) -> str:
    """A digest that changes when anything in the folder that rows are built from changes."""
    seen: list[tuple[str, str]] = []
    for path in _sources(paths):
        stamp = _stamp(path)
        if stamp:
            seen.append((path.relative_to(paths.directory).as_posix(), stamp))
    return document_digest([INGEST_VERSION, str(paths.directory), seen])


def read_checkpoints(paths: RunPaths, known: Mapping[str, Row]) -> list[FoundCheckpoint]:
    """Every checkpoint that was ever committed here and left a manifest or a tombstone.

    `known` are rows from an earlier reading, by name: a manifest that has not changed since is
    not read again. A directory without a manifest is no checkpoint and is passed over.
    """
    found: dict[str, FoundCheckpoint] = {}
    for path in sorted(paths.tombstones.glob("*.json")):
        name = CheckpointName.parse(path.stem)
        if name and name.step <= INTEGER_MAX:
            found[path.stem] = _found(name, path, known, is_deleted=True)
    for directory in paths.list_checkpoints():
        name = CheckpointName.parse(directory.name)
        manifest = directory / MANIFEST
        # The manifest is what commits: while it stands, a deletion was not carried through.
        if name and name.step <= INTEGER_MAX and _stamp(manifest):
            found[directory.name] = _found(name, manifest, known, is_deleted=False)
    return sorted(found.values(), key=lambda one: one.name)


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


def empty_facts(detail: str | None) -> Row:
    """The facts of a checkpoint whose manifest says nothing that can be believed."""
    return {**dict.fromkeys(FACTS), "metrics": {}, "detail": detail}


def _found(
    name: CheckpointName, path: Path, known: Mapping[str, Row], *, is_deleted: bool
) -> FoundCheckpoint:
    stamp = f"{'deleted' if is_deleted else 'there'} {_stamp(path)}"
    row = known.get(str(name))
    if row and row["stamp"] == stamp:
        facts = {column: row[column] for column in FACTS}
        # With a checksum the manifest was believed, and the detail came from a journal.
        facts["detail"] = None if row["checksum"] else row["detail"]
    else:
        facts = _facts_of_tombstone(path) if is_deleted else _facts_of(path.parent)
    return FoundCheckpoint(name=name, facts=facts, stamp=stamp, is_deleted=is_deleted)


def _facts_of(directory: Path) -> Row:
    try:
        manifest = read_manifest(directory)
    except DamagedCheckpointError as error:
        return empty_facts("; ".join(error.damaged) or str(error))
    except OSError as error:
        return empty_facts(f"{MANIFEST}: cannot be read: {error.strerror}")
    return _facts(manifest) if manifest else empty_facts(f"{MANIFEST}: gone while it was read")


def _facts_of_tombstone(path: Path) -> Row:
    try:
        return _facts(Manifest.model_validate_json(path.read_bytes()))
    except (ValidationError, OSError):
        return empty_facts("its manifest could not be read")


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
        "detail": None,
    }


def _finite(value: float) -> float | None:
    """`value` unless it is one of the floats that JSON does not have."""
    return value if math.isfinite(value) else None


def _sources(paths: RunPaths) -> Iterator[Path]:
    """Every file that rows are built from."""
    yield paths.spec
    yield from paths.list_journals()
    for attempt in paths.list_attempts():
        yield attempt.directory
        yield from (attempt.request, attempt.submission, attempt.claim, attempt.outcome)
    yield from sorted(paths.tombstones.glob("*.json"))
    yield from (directory / MANIFEST for directory in paths.list_checkpoints())


def _stamp(path: Path) -> str:
    """Size and time of the last change, empty when there is no such file."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    # A directory's time and size say what lies beside our files; that it exists is enough.
    return "directory" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} {status.st_mtime_ns}"
