"""Reads `.metadata`, DCP's pickle, without running code from the file.

Only the record classes that DCP's own planner and file writer use are known. Any other name is
refused and never looked up.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from torch.distributed.checkpoint.metadata import Metadata

from holdfast.contracts.disk import digests, reading
from holdfast.contracts.disk.manifest import (
    FileEntry,
    Manifest,
    files_folder,
    read_manifest,
    require_readable,
)
from holdfast.contracts.disk.paths import MANIFEST
from holdfast.contracts.disk.paths import METADATA as METADATA
from holdfast.contracts.errors import DamagedCheckpointError, ForeignFileError
from holdfast.trainer.format import metadata_check, metadata_makers, plain_pickle
from holdfast.trainer.format.column_reader import OtherForm, read_columns
from holdfast.trainer.format.saved_boxes import BoxTable

T = TypeVar("T")

CHUNK_BYTES: Final = 1 << 20
ERROR_CHARACTERS_MAX: Final = 300
# The metadata of 10,000 ranks with 1,000 tensors each has about 1 GB.
METADATA_BYTES_MAX: Final = 8 << 30
_OF_A_STAGE: Final = re.compile(r"pp(\d+)/\.metadata")


def parse_metadata(content: bytes, source: str) -> Metadata:
    """Return the metadata in `content`. `source` names it in errors.

    Raises `DamagedCheckpointError` if it is not a DCP metadata, or names anything except DCP's own
    classes. No code of such a file is run.
    """
    return _parse(iter((content,)), source)


def _parse(chunks: Iterator[bytes], source: str) -> Metadata:
    try:
        # Never Python's unpickler: even with a list of allowed names it is not safe, see
        # decision 28.
        parsed = plain_pickle.read_pickle(
            chunks,
            metadata_makers.find_maker,
            metadata_makers.BUILDS,
            keys=metadata_makers.KEY_TYPES,
        )
        problem = _problem_of(parsed)
    except OSError:
        raise
    except Exception as error:
        # A hostile or truncated pickle can raise any exception.
        problem = shorten_error(error)
        raise DamagedCheckpointError(
            f"{source}: not the metadata of a DCP checkpoint: {problem}. "
            "Load another checkpoint, or write this one again with DCP",
            damaged=[f"{METADATA}: {problem}"],
        ) from error
    if problem:
        raise DamagedCheckpointError(
            f"{source}: {problem}. Load another checkpoint, or write this one again with DCP",
            damaged=[f"{METADATA}: {problem}"],
        )
    return cast(Metadata, parsed)


def _problem_of(parsed: Any) -> str | None:
    if type(parsed) is not Metadata:
        return f"holds a {type(parsed).__name__}, expected DCP's Metadata"
    return metadata_check.find_problem(parsed)


def shorten_error(error: Exception) -> str:
    """Return an error's text, cut to a length that is safe for an untrusted file."""
    text = str(error) or type(error).__name__
    return text if len(text) <= ERROR_CHARACTERS_MAX else f"{text[:ERROR_CHARACTERS_MAX]}…"


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint. `manifest` is None for one that stock DCP wrote.

    `boxes` are the places of all parts. With `is_lean`, `metadata` has keys without chunks and
    places, because ten million objects would take minutes.
    """

    directory: Path
    manifest: Manifest | None
    metadata: Metadata
    boxes: BoxTable
    is_lean: bool = False


def open_checkpoint(
    directory: Path, manifest: Manifest | None = None, *, is_lean: bool = False
) -> Opened:
    """Return the merged metadata of all stages of a checkpoint of Holdfast or stock DCP.

    `manifest` is the one of `find_files`, if the caller has it. With `is_lean`, what Holdfast wrote
    is read into columns, for a load that needs no objects.

    If there is a manifest, it must match the bytes before they are used and must list every file
    that they name. Raises `DamagedCheckpointError` if files differ, are missing, cannot be read,
    are not DCP's, or lie outside the directory.
    """
    if manifest is None:
        directory, manifest = find_files(directory)
    if is_lean and (opened := open_columns(directory, manifest)):
        return opened
    parts = {
        path.removesuffix(METADATA): _read_metadata(directory, path, manifest)
        for path in _metadata_paths(directory, manifest)
    }
    metadata = merge(parts)
    try:
        boxes = BoxTable.of(metadata)
    except OverflowError as error:
        raise _unreadable(directory, METADATA, error) from error
    _check_paths(directory, boxes, manifest)
    return Opened(directory, manifest, metadata, boxes)


def open_columns(directory: Path, manifest: Manifest | None) -> Opened | None:
    """Open a checkpoint with one `.metadata` of Holdfast's form. Return None for other forms."""
    if _metadata_paths(directory, manifest) == [METADATA]:
        with contextlib.suppress(OtherForm):
            metadata, boxes = _read_with(directory, METADATA, manifest, read_columns)
            _check_paths(directory, boxes, manifest)
            return Opened(directory, manifest, metadata, boxes, is_lean=True)
    return None


def find_files(directory: Path) -> tuple[Path, Manifest | None]:
    """Return where the files of the checkpoint in `directory` are, and their manifest.

    They are elsewhere if the run's program placed them in its own directory. Raises
    `DamagedCheckpointError` if the manifest or the other directory cannot be read.
    """
    try:
        manifest = reading.read_again(lambda: read_manifest(directory))
    except OSError as error:
        raise _unreadable(directory, MANIFEST, error) from error
    if manifest is None or manifest.source is None:
        return directory, manifest
    source = Path(manifest.source)
    require_readable(manifest, "load it")
    try:
        with files_folder(directory, manifest):
            pass
    except ForeignFileError as error:
        raise DamagedCheckpointError(
            f"{error}; load another checkpoint", damaged=[error.problem]
        ) from error
    except OSError as error:
        raise _unreadable(source.parent, source.name, error) from error
    # Another folder in this place would not match the manifest.
    return source, manifest.model_copy(update={"source": None})


def merge(parts: Mapping[str, Metadata]) -> Metadata:
    """Merge the metadata of all stages. The keys of `parts` are their folders, `pp0/` and so on.

    If several stages have a key, such as a tied embedding's, the first stage's entry counts.
    Without stages, the metadata stays as saved, including what a user's planner put there.
    """
    # Without stages, nothing is copied: a custom planner may keep anything in `planner_data`.
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
    """Return the paths of nested keys that stock DCP's planner keeps. Empty for other planners."""
    # A planner of the user's own may keep any object there, see decision 15.
    kept = metadata.planner_data
    return kept if isinstance(kept, Mapping) else {}


def pick_entries(metadata: Metadata, names: Mapping[str, str]) -> Metadata:
    """Return the entries that `names` has, each under its new name."""
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
    """Return the bytes of a small file, checked against the manifest if there is one.

    Raises `DamagedCheckpointError` if they differ, cannot be read or exceed `bytes_max`.
    """
    entry = _entry_of(path, manifest)
    # The smaller of both: a hostile file must not fill the memory before it is compared.
    most = bytes_max if entry is None else min(bytes_max, entry.bytes)
    try:
        content = reading.read_again(
            lambda: reading.read_bounded(directory / path, most, below=directory, follow=True)
        )
    except (OSError, ValueError) as error:
        raise _unreadable(directory, path, error) from error
    problem = entry.difference(content) if entry is not None else None
    if problem is not None:
        raise _different(directory, path, problem)
    return content


def _read_metadata(directory: Path, path: str, manifest: Manifest | None) -> Metadata:
    return _read_with(directory, path, manifest, partial(_parse, source=str(directory / path)))


def _read_with(
    directory: Path, path: str, manifest: Manifest | None, parse: Callable[[Iterator[bytes]], T]
) -> T:
    """Read and parse one `.metadata` in chunks, so that the whole file is never in memory."""
    entry, problems = _entry_of(path, manifest), list[str]()
    try:
        handle = reading.read_again(
            lambda: reading.open_regular(directory / path, below=directory, follow=True)
        )
        try:
            size = os.fstat(handle).st_size
            if entry is not None and size != entry.bytes:
                raise _different(directory, path, f"{size} bytes, expected {entry.bytes}")
            if size > METADATA_BYTES_MAX:
                problem = f"{size} bytes, expected {METADATA_BYTES_MAX} or less"
                raise _different(directory, path, problem)
            chunks = _chunks(handle, size, entry, problems)
            try:
                return parse(chunks)
            # Reading on to the end completes the digests, even if the parser stopped early.
            finally:
                # A mismatch with the manifest takes precedence over a parse error.
                if entry is not None:
                    deque(chunks, maxlen=0)
                if problems:
                    raise _different(directory, path, problems[0])
        finally:
            os.close(handle)
    except OtherForm:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(directory, path, error) from error


def _chunks(
    handle: int, size: int, entry: FileEntry | None, problems: list[str]
) -> Iterator[bytes]:
    """Yield the bytes of an open file. A mismatch with `entry` is added to `problems`."""
    for start, length, expected in entry.spans() if entry else [(0, size, "")]:
        running = digests.new_checksum()
        # In pieces, so that a sparse file fails at its first hole, see decision 28.
        for at in range(start, start + length, CHUNK_BYTES):
            count = min(CHUNK_BYTES, start + length - at)
            piece = reading.read_again(partial(os.pread, handle, count, at))
            if entry is not None:
                running.update(piece)
            if len(piece) < count:
                problems.append(f"the file ends before byte {at + count}, expected {size} bytes")
                return
            yield piece
        if entry is not None and (found := running.hexdigest()) != expected:
            problems.append(entry.describe(start, found))
            return


def _entry_of(path: str, manifest: Manifest | None) -> FileEntry | None:
    return next((e for e in manifest.files if e.path == path), None) if manifest else None


def _unreadable(directory: Path, path: str, error: Exception) -> DamagedCheckpointError:
    problem = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error)
    return DamagedCheckpointError(
        f"{directory / path}: cannot be read: {problem}; expected the directory of a DCP "
        "checkpoint",
        damaged=[f"{path}: {problem}"],
    )


def _different(directory: Path, path: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{directory / path}: differs from the committed file and is not opened: {problem}. Run "
        "`holdfast verify` for a list of all damage",
        damaged=[f"{path}: {problem}"],
    )


def _metadata_paths(directory: Path, manifest: Manifest | None) -> list[str]:
    """Return the `.metadata` of the directory and its stages, in order; at least the former."""
    if manifest is not None:
        files = [entry.path for entry in manifest.files]
    else:
        files = [str(path.relative_to(directory)) for path in directory.glob(f"*/{METADATA}")]
        files += [METADATA] if (directory / METADATA).exists() else []
    stages = {int(match[1]): path for path in files if (match := _OF_A_STAGE.fullmatch(path))}
    own = [METADATA] if METADATA in files or not stages else []
    return own + [stages[stage] for stage in sorted(stages)]


def _check_paths(directory: Path, boxes: BoxTable, manifest: Manifest | None) -> None:
    """Refuse files that lie outside the directory or are shorter than `.metadata` requires."""
    listed = {entry.path: entry.bytes for entry in manifest.files} if manifest else None
    for path, extent in boxes.extents.items():
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
    """Return the problem with a file of which `.metadata` uses the first `extent` bytes."""
    try:
        # A load opens the files of a manifest so that links cannot leave the directory. To resolve
        # each of thousands here would cost metadata operations on shared storage.
        is_checked_later = listed is not None and path in listed
        if not is_checked_later and not _is_inside(directory, path):
            return "points outside the directory, to"
        if listed is not None:
            size = listed.get(path, -1)
        else:
            size = (directory / path).stat().st_size if (directory / path).is_file() else -1
    except (OSError, RuntimeError):
        # A cycle of links raises RuntimeError.
        size = -1
    if size < 0:
        return "names a file that the checkpoint does not have,"
    return "names bytes that are not in the file" if extent < 0 or extent > size else None


def _is_inside(directory: Path, path: str) -> bool:
    return (directory / path).resolve().is_relative_to(directory.resolve())
