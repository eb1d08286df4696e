"""Reading `.metadata`, DCP's pickle, without running what a stranger put into it.

Only the records that DCP's own planner and file writer put there are known; any other name is
refused, and none is ever looked up.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from torch.distributed.checkpoint.metadata import Metadata

from holdfast.contracts.digests import new_checksum
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.manifest import FileEntry, Manifest, read_manifest
from holdfast.contracts.paths import MANIFEST
from holdfast.contracts.reading import open_regular, read_bounded
from holdfast.contracts.retries import read_again
from holdfast.trainer.planning.metadata_check import find_problem
from holdfast.trainer.planning.metadata_makers import BUILDS, KEY_TYPES, find_maker
from holdfast.trainer.planning.plain_pickle import read_pickle

METADATA: Final = ".metadata"
CHUNK_BYTES: Final = 1 << 20
WORDS_MAX: Final = 300
# That of 10,000 ranks with 1,000 tensors each has about 1 GB.
METADATA_BYTES_MAX: Final = 8 << 30
_OF_A_STAGE: Final = re.compile(r"pp(\d+)/\.metadata")


def parse_metadata(content: bytes, source: str) -> Metadata:
    """The metadata in `content`; `source` names it in errors.

    Raises `DamagedCheckpointError` when it is no metadata of DCP, or names anything else than
    DCP's own classes: no code of such a file is run.
    """
    return _parse(iter((content,)), source)


def _parse(chunks: Iterator[bytes], source: str) -> Metadata:
    try:
        parsed = read_pickle(chunks, find_maker, BUILDS, keys=KEY_TYPES)
        problem = _problem_of(parsed)
    except OSError:
        raise
    except Exception as error:
        # A hostile or torn pickle can raise anything at all; whatever it was, it is not ours.
        words = shorten_words(error)
        raise DamagedCheckpointError(
            f"{source}: not the metadata of a DCP checkpoint: {words}; "
            "load another checkpoint, or write this one again with DCP",
            damaged=[f"{METADATA}: {words}"],
        ) from error
    if problem:
        raise DamagedCheckpointError(
            f"{source}: {problem}; load another checkpoint, or write this one again with DCP",
            damaged=[f"{METADATA}: {problem}"],
        )
    return cast(Metadata, parsed)


def _problem_of(parsed: Any) -> str | None:
    if type(parsed) is not Metadata:
        return f"holds a {type(parsed).__name__}, expected DCP's Metadata"
    return find_problem(parsed)


def shorten_words(error: Exception) -> str:
    """An error in words, however much a stranger's file put into them."""
    words = str(error) or type(error).__name__
    return words if len(words) <= WORDS_MAX else f"{words[:WORDS_MAX]}…"


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was looked into: `manifest` is None for one that stock DCP wrote."""

    directory: Path
    manifest: Manifest | None
    metadata: Metadata


def read_metadata(directory: Path) -> Metadata:
    """The metadata of the checkpoint in `directory`; see `open_checkpoint`."""
    return open_checkpoint(directory).metadata


def open_checkpoint(directory: Path) -> Opened:
    """The metadata of the checkpoint in `directory`, ours or stock DCP's, of all its stages.

    A manifest, where there is one, must bear out the bytes before they are used, and must have
    every file that they name. Raises `DamagedCheckpointError` when they differ, are missing,
    cannot be read, are not DCP's, or lead outside the directory.
    """
    try:
        manifest = read_again(lambda: read_manifest(directory))
    except OSError as error:
        raise _unreadable(directory, MANIFEST, error) from error
    return open_committed(directory, manifest)


def open_committed(directory: Path, manifest: Manifest | None) -> Opened:
    """The same of a checkpoint whose manifest was read before."""
    parts = {
        path.removesuffix(METADATA): _read_metadata(directory, path, manifest)
        for path in _metadata_paths(directory, manifest)
    }
    metadata = merge(parts)
    _check_paths(directory, metadata, manifest)
    return Opened(directory, manifest, metadata)


def merge(parts: Mapping[str, Metadata]) -> Metadata:
    """One metadata of those of all stages; keys of `parts` are their folders, `pp0/` and so on.

    A key that several stages have, such as a tied embedding's, is the first one's. Without stages
    all is as it was saved, with what a planner of one's own may have put there.
    """
    if parts.keys() == {""}:
        return parts[""]
    merged = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
    for folder, part in parts.items():
        new = part.state_dict_metadata.keys() - merged.state_dict_metadata.keys()
        merged.state_dict_metadata.update(
            {key: entry for key, entry in part.state_dict_metadata.items() if key in new}
        )
        merged.planner_data.update(
            {key: path for key, path in paths_of(part).items() if key in new}
        )
        for index, info in (part.storage_data or {}).items():
            if index.fqn in new:
                moved = replace(info, relative_path=folder + info.relative_path)
                merged.storage_data[index] = moved if folder else info
    return merged


def paths_of(metadata: Metadata) -> Mapping[str, Any]:
    """The paths of nested keys, as stock DCP's planner keeps them; other planners keep others."""
    kept = metadata.planner_data
    return kept if isinstance(kept, Mapping) else {}


def pick_entries(metadata: Metadata, names: Mapping[str, str]) -> Metadata:
    """The entries that `names` has, each under its new name."""
    return Metadata(
        state_dict_metadata={
            names[key]: entry for key, entry in metadata.state_dict_metadata.items() if key in names
        },
        planner_data={names[key]: path for key, path in paths_of(metadata).items() if key in names},
        storage_data={
            replace(index, fqn=names[index.fqn]): info
            for index, info in (metadata.storage_data or {}).items()
            if index.fqn in names
        },
    )


def read_verified(directory: Path, path: str, manifest: Manifest | None, bytes_max: int) -> bytes:
    """The bytes of a small file of a checkpoint, borne out by the manifest where there is one.

    Raises `DamagedCheckpointError` when they are not, cannot be read or are over `bytes_max`.
    """
    entry = _entry_of(path, manifest)
    most = bytes_max if entry is None else min(bytes_max, entry.bytes)
    try:
        content = read_again(
            lambda: read_bounded(directory / path, most, below=directory, follow=True)
        )
    except (OSError, ValueError) as error:
        raise _unreadable(directory, path, error) from error
    problem = entry.difference(content) if entry is not None else None
    if problem is not None:
        raise _different(directory, path, problem)
    return content


def _read_metadata(directory: Path, path: str, manifest: Manifest | None) -> Metadata:
    """One `.metadata`, parsed as it is read: at no time is all of it in memory."""
    entry, problems = _entry_of(path, manifest), list[str]()
    try:
        handle = read_again(lambda: open_regular(directory / path, below=directory, follow=True))
        try:
            size = os.fstat(handle).st_size
            if entry is not None and size != entry.bytes:
                raise _different(directory, path, f"{size} bytes, expected {entry.bytes}")
            if size > METADATA_BYTES_MAX:
                problem = f"{size} bytes, expected {METADATA_BYTES_MAX} or less"
                raise _different(directory, path, problem)
            chunks = _chunks(handle, size, entry, problems)
            try:
                return _parse(chunks, str(directory / path))
            finally:
                # What the manifest says of the bytes comes before what they say.
                if entry is not None:
                    deque(chunks, maxlen=0)
                if problems:
                    raise _different(directory, path, problems[0])
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise _unreadable(directory, path, error) from error


def _chunks(
    handle: int, size: int, entry: FileEntry | None, problems: list[str]
) -> Iterator[bytes]:
    """The bytes of an open file; `problems` gets what of them is not as its entry says."""
    for start, length, expected in entry.spans() if entry else [(0, size, "")]:
        running = new_checksum()
        for at in range(start, start + length, CHUNK_BYTES):
            count = min(CHUNK_BYTES, start + length - at)
            piece = read_again(partial(os.pread, handle, count, at))
            if entry is not None:
                running.update(piece)
            if len(piece) < count:
                problems.append(f"it ends before byte {at + count}, expected {size} bytes")
                return
            yield piece
        if entry is not None and (found := running.hexdigest()) != expected:
            problems.append(entry.describe(start, found))
            return


def _entry_of(path: str, manifest: Manifest | None) -> FileEntry | None:
    return next((e for e in manifest.files if e.path == path), None) if manifest else None


def _unreadable(directory: Path, path: str, error: Exception) -> DamagedCheckpointError:
    words = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error)
    return DamagedCheckpointError(
        f"{directory / path}: cannot be read: {words}; expected the directory of a DCP checkpoint",
        damaged=[f"{path}: {words}"],
    )


def _different(directory: Path, path: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{directory / path}: it is not what was committed, so it is not opened: {problem}; "
        "`holdfast verify` lists what else is damaged",
        damaged=[f"{path}: {problem}"],
    )


def extents_of(metadata: Metadata) -> dict[str, int]:
    """How far the entries reach into each file, in bytes; -1 where one begins before it."""
    extents: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        sound = info.offset >= 0 and info.length >= 0
        end = info.offset + info.length if sound else -1
        before = extents.get(info.relative_path, 0)
        extents[info.relative_path] = max(before, end) if min(before, end) >= 0 else -1
    return extents


def _metadata_paths(directory: Path, manifest: Manifest | None) -> list[str]:
    """`.metadata` of the directory and of its stages, in order; at least the directory's own."""
    if manifest is not None:
        files = [entry.path for entry in manifest.files]
    else:
        files = [str(path.relative_to(directory)) for path in directory.glob(f"*/{METADATA}")]
        files += [METADATA] if (directory / METADATA).exists() else []
    stages = {int(match[1]): path for path in files if (match := _OF_A_STAGE.fullmatch(path))}
    own = [METADATA] if METADATA in files or not stages else []
    return own + [stages[stage] for stage in sorted(stages)]


def _check_paths(directory: Path, metadata: Metadata, manifest: Manifest | None) -> None:
    """Refuse files that lie outside the directory or are shorter than `.metadata` needs."""
    listed = {entry.path: entry.bytes for entry in manifest.files} if manifest else None
    for path, extent in extents_of(metadata).items():
        problem = _problem_of_path(directory, path, extent, listed)
        if problem:
            raise DamagedCheckpointError(
                f"{directory}: its {METADATA} {problem} {path!r}; expected its own files. Load "
                "another checkpoint",
                damaged=[f"{METADATA}: names {path!r}"],
            )


def _problem_of_path(
    directory: Path, path: str, extent: int, listed: Mapping[str, int] | None
) -> str | None:
    """What is wrong with a file of which `.metadata` names the first `extent` bytes."""
    try:
        if not (directory / path).resolve().is_relative_to(directory.resolve()):
            return "points outside the directory, to"
        if listed is not None:
            size = listed.get(path, -1)
        else:
            size = (directory / path).stat().st_size if (directory / path).is_file() else -1
    except (OSError, RuntimeError):
        # Links that lead in a circle are a RuntimeError.
        size = -1
    if size < 0:
        return "names a file that the checkpoint does not have,"
    return "names bytes that are not in the file" if extent < 0 or extent > size else None
