"""Reads a run's folder for the index: its checkpoints and fingerprint.

A folder may change while it is read. Therefore the survey, which computes the fingerprint, comes
first: a change after it gives another fingerprint at the next ingest.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.digests import number_of
from holdfast.contracts.disk.manifest import Manifest, read_manifest, read_tombstone
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths, is_foreign
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.lineage.database.states import INTEGER_MAX

Row = dict[str, Any]

_METRICS: Final = re.compile(r"a([0-9]{4,9})\.l([0-9]{2,9})")

# About ten million lines.
METRICS_BYTES_MAX: Final = 1 << 30
# Increase this when rows are built differently, so that every run is ingested again.
INGEST_VERSION: Final = 7
JOURNALS: Final = "journal"
TOMBSTONE: Final = ".json"
_DIRECTORY: Final = "directory"
_DELETED: Final = "deleted"
_THERE: Final = "there"
# The columns that come from the manifest. The others come from the name and the journals.
FACTS: Final = (
    *("reason", "world_size", "parent", "bytes", "files", "checksum", "command_digest"),
    *("blocked_s", "flush_s", "staged_at", "committed_at", "metrics", "detail"),
    *("versions", "topology"),
)

# (path, bytes, checksum) of each file, in the manifest's order.
FileFacts = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Survey:
    """The result of one survey of a run's folder, by `stat` alone.

    `parts` has a number for the files of each attempt, and of the run itself as attempt 0. It
    changes with every file from which rows are built. `stamps` has the manifest or the tombstone
    of each checkpoint, by name. All numbers together are the fingerprint.
    """

    parts: Mapping[int, int]
    stamps: Mapping[str, str] = field(repr=False)

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(sum(self.parts.values()) + sum_of(self.stamps))


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

    A directory without a manifest is not a checkpoint and is ignored. A manifest commits: while it
    exists, the checkpoint is not deleted, despite a tombstone.
    """
    parts = survey_parts(paths, [0, *paths.attempt_numbers()])
    stamps: dict[str, str] = {}
    for entry in _entries(f"{paths.tombstones}", TOMBSTONE):
        name = entry.name.removesuffix(TOMBSTONE)
        if _is_name(name) and (stamp := _stamp(entry)):
            stamps[name] = f"{_DELETED} {stamp}"
    folder = str(paths.checkpoints)
    for checkpoint in paths.list_checkpoint_names():
        stamp = _stamp_at(f"{folder}/{checkpoint}/{MANIFEST}")
        # A larger step fits into no column. The checkpoint stays usable, but has no row.
        if stamp and checkpoint.step <= INTEGER_MAX:
            stamps[str(checkpoint)] = f"{_THERE} {stamp}"
    return Survey(parts, stamps)


def survey_parts(paths: RunPaths, attempts: Iterable[int]) -> dict[int, int]:
    """Return a number for the files of each of `attempts`; attempt 0 is the run itself."""
    return {number: sum_of(_documents(paths, number)) for number in attempts}


def survey_checkpoint(paths: RunPaths, name: str) -> str:
    """Return the stamp of one checkpoint, as in `Survey.stamps`; empty if it has none."""
    folder = paths.checkpoints
    # `checkpoints` may be another user's link. Its target is none of this run's.
    if _is_name(name) and not is_foreign(folder) and _stamp_at(f"{folder}/{name}") == _DIRECTORY:
        stamp = _stamp_at(f"{folder}/{name}/{MANIFEST}")
        if stamp:
            return f"{_THERE} {stamp}"
    stamp = _stamp_at(str(paths.tombstone(name))) if _is_name(name) else ""
    return f"{_DELETED} {stamp}" if stamp else ""


def is_deleted(stamp: str) -> bool:
    """Return True for the stamp of a tombstone."""
    return stamp.startswith(_DELETED)


def is_there(stamp: str) -> bool:
    """Return True for the stamp of a manifest."""
    return stamp.startswith(_THERE)


def sum_of(stamps: Mapping[str, str]) -> int:
    """Return the sum of a hash of each name and stamp. It does not depend on their order."""
    # A sum does not depend on the order, so it can be kept up to date file by file, see
    # decision 86.
    return sum(hash_of(name, stamp) for name, stamp in stamps.items())


def hash_of(name: str, stamp: str) -> int:
    """Return the number of one entry of a fingerprint; 0 for no stamp."""
    text = f"{name}\0{stamp}".encode(errors="surrogatepass")
    return number_of(text) if stamp else 0


def fingerprint_of(number: int) -> str:
    """Return a fingerprint with this version, from the sum of its entries' hashes."""
    # The version belongs to the fingerprint: a newer program builds the rows again, and an older
    # one keeps them, see decision 41.
    return f"{INGEST_VERSION}:{number % (1 << 128):032x}"


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


def read_checkpoint(paths: RunPaths, name: str, stamp: str, row: Row | None) -> FoundCheckpoint:
    """Return a checkpoint, from its unchanged `row` or else from its manifest or tombstone."""
    parsed = CheckpointName.parse(name)
    assert parsed is not None
    is_gone = is_deleted(stamp)
    found = partial(FoundCheckpoint, name=parsed, stamp=stamp, is_deleted=is_gone)
    # The manifest of a committed checkpoint never changes, so the row has its facts already.
    if row and row["stamp"] == stamp:
        facts = {column: row[column] for column in FACTS}
        # If the row has a checksum, the manifest was valid and the detail came from a journal.
        facts["detail"] = None if row["checksum"] else row["detail"]
        return found(facts=facts, files=None)
    content = _read_tombstone(paths.tombstone(name)) if is_gone else _read(paths, name)
    if isinstance(content, str):
        return found(facts=empty_facts(content))
    files = tuple((one.path, one.bytes, one.checksum) for one in content.files)
    return found(facts=_facts(content), files=files)


def list_metrics(
    paths: RunPaths, attempts: Collection[int] | None = None
) -> dict[tuple[int, int], Path]:
    """Return the metrics files, or those of some attempts, by (attempt, launch)."""
    found = {}
    for entry in _entries(str(paths.metrics), ".jsonl"):
        match = _METRICS.fullmatch(entry.name.removesuffix(".jsonl"))
        if match and (attempts is None or int(match[1]) in attempts):
            path = paths.metrics / entry.name
            if _is_plausible(path):
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


def _read(paths: RunPaths, name: str) -> Manifest | str:
    """Return the manifest of a checkpoint, or the reason why it is invalid."""
    try:
        manifest = read_manifest(paths.checkpoint(name))
    except DamagedCheckpointError as error:
        return "; ".join(error.damaged) or str(error)
    except OSError as error:
        return f"{MANIFEST}: cannot be read: {error.strerror}"
    return manifest or f"{MANIFEST}: deleted while it was read"


def _read_tombstone(path: Path) -> Manifest | str:
    return read_tombstone(path) or "its manifest could not be read"


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


def _documents(paths: RunPaths, number: int) -> dict[str, str]:
    """Return the stamps of the files of an attempt, or of the run, from which rows are built."""
    base = str(paths.directory)
    if number:
        own = paths.attempt(number)
        base = str(own.directory)
        places = [base, *map(str, (own.request, own.submission, own.claim, own.outcome))]
    else:
        places = [str(paths.spec)]
    found = {place: _stamp_at(place) for place in places}
    if not number:
        # Who may read a run is a part of its row.
        found[base] = _mode_at(base)
    for entry in _entries(f"{base}/{JOURNALS}", ".jsonl"):
        found[f"{base}/{JOURNALS}/{entry.name}"] = _stamp(entry)
    return found


def _is_name(name: str) -> bool:
    """Return True for the name of a checkpoint that can have a row."""
    parsed = CheckpointName.parse(name)
    return parsed is not None and parsed.step <= INTEGER_MAX


def _entries(folder: str, suffix: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if entry.name.endswith(suffix))
    except (FileNotFoundError, NotADirectoryError):
        return


def _stamp(entry: os.DirEntry[str]) -> str:
    try:
        return _stamp_of(entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return ""


def _stamp_at(path: str) -> str:
    """Return the size and modification time of a file; empty if it does not exist."""
    try:
        return _stamp_of(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _mode_at(path: str) -> str:
    """Return the permissions of a folder; empty if it does not exist."""
    try:
        return f"{stat.S_IMODE(os.lstat(path).st_mode):o}"
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _stamp_of(status: os.stat_result) -> str:
    # The time of a directory changes with unrelated files, so record only that it exists.
    is_directory = stat.S_ISDIR(status.st_mode)
    return _DIRECTORY if is_directory else f"{status.st_size} {status.st_mtime_ns}"
