"""Import weights of another program as the first checkpoint of a run.

    python -m holdfast.trainer.importing SOURCE --run FOLDER --uid UID [--json]

The import needs no GPU, no process group, and not the program that trained.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from holdfast.contracts.disk import durable, reading
from holdfast.contracts.disk.digests import (
    FileChecksum,
    RunningDigest,
    document_digest,
    new_checksum,
)
from holdfast.contracts.disk.direct import DirectFile
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.disk.paths import IMPORTED, TRAIN_STATE, RunPaths
from holdfast.contracts.errors import CheckpointError
from holdfast.contracts.plain_text import counted
from holdfast.trainer.flusher.commit import commit_alone
from holdfast.trainer.format import metadata, opcodes
from holdfast.trainer.loading.past_cache import huge_memory
from holdfast.trainer.planning.global_plan import offsets_of
from holdfast.trainer.planning.layout import TensorTemplate, make_template
from holdfast.trainer.sources import find, tensors
from holdfast.trainer.staging.step_facts import versions
from holdfast.trainer.state.imported import document_of

# Writes the files of an import: bytes flow from the source to the checkpoint in small pieces.
#
# No file is held in memory. Each piece is added to the checksums of the file and of the
# tensor, and then written, with direct writes where possible.

# Plans the DCP files of an import: which bytes lie where, and the `.metadata` that says so.

# Several files are written at the same time. A file far above this has long blocks, of which a
# rank that needs a part would read more than it needs.
FILE_BYTES_MAX: Final = 4 << 30
FILE_BYTES_MIN: Final = 64 << 20
FILES_WANTED: Final = 4
FILE_NAME: Final = "__0_{number}.distcp"


@dataclass(frozen=True)
class PartEntry:
    """One part in a file: its zip begins at `start` and has the form of `template`."""

    part: tensors.SourcePart
    start: int
    template: TensorTemplate


@dataclass(frozen=True)
class FileImage:
    """One file to write: its name, its entries in order, and its length in bytes."""

    name: str
    entries: tuple[PartEntry, ...]
    length: int

    def pieces(self) -> Iterator[tuple[int, bytes | tensors.SourcePart]]:
        """Yield (position, content) in order: headers and footers as bytes, and the tensors."""
        for entry in self.entries:
            data_at, is_open = entry.template.data_at, True
            for at, piece in entry.template.pieces:
                if is_open and at >= data_at:
                    yield entry.start + data_at, entry.part
                    is_open = False
                yield entry.start + at, piece
            if is_open:
                # A tensor without elements has no bytes between its header and footer.
                yield entry.start + entry.template.length, entry.part


def plan_images(parts: Sequence[tensors.SourcePart]) -> list[FileImage]:
    """Return the files for these parts. A part is never split."""
    total = sum(part.bytes for part in parts)
    wanted = min(FILE_BYTES_MAX, max(FILE_BYTES_MIN, total // FILES_WANTED))
    groups: list[list[tensors.SourcePart]] = [[]]
    size = 0
    for part in tensors.in_file_order(parts):
        if groups[-1] and size + part.bytes > wanted:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.bytes
    return [_image(FILE_NAME.format(number=n), group) for n, group in enumerate(groups)]


def encode_metadata(images: Sequence[FileImage]) -> bytes:
    """Return `.metadata`, DCP's pickle, for the parts under the keys `model.<name>`."""
    chunks: dict[str, list[dcp.ChunkStorageMetadata]] = defaultdict(list)
    first: dict[str, tensors.SourcePart] = {}
    storage = {}
    for image in images:
        for entry in image.entries:
            part, key = entry.part, f"{tensors.MODEL}{entry.part.name}"
            first.setdefault(key, part)
            index = dcp.MetadataIndex(key, part.offsets, len(chunks[key]))
            chunks[key].append(
                dcp.ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
            )
            storage[index] = _StorageInfo(image.name, entry.start, entry.template.length)
    return opcodes.dump_metadata(
        dcp.Metadata(
            state_dict_metadata={
                key: dcp.TensorStorageMetadata(
                    properties=dcp.TensorProperties(dtype=first[key].dtype),
                    size=torch.Size(first[key].shape),
                    chunks=found,
                )
                for key, found in chunks.items()
            },
            planner_data={key: tuple(key.split(".", 1)) for key in chunks},
            storage_data=storage,
            version=CURRENT_DCP_VERSION,
        )
    )


def _image(name: str, parts: Sequence[tensors.SourcePart]) -> FileImage:
    templates: dict[tuple[tuple[int, ...], torch.dtype], TensorTemplate] = {}
    for part in parts:
        form = part.sizes, part.dtype
        if form not in templates:
            templates[form] = make_template(torch.Size(part.sizes), part.dtype)
    found = [templates[part.sizes, part.dtype] for part in parts]
    lengths = np.array([template.length for template in found], dtype=np.int64)
    starts = offsets_of(lengths).tolist()
    entries = [PartEntry(*one) for one in zip(parts, starts, found, strict=True)]
    return FileImage(name, tuple(entries), starts[-1] + found[-1].length)


PIECE_BYTES: Final = 8 << 20
WRITERS: Final = 4
# Elements that are put into order together. Each takes some tens of bytes meanwhile.
ELEMENTS_MAX: Final = 1 << 16

# (name, offsets) of a part, and the digest of its bytes.
Digests = dict[tuple[str, tuple[int, ...]], str]


def write_images(
    images: list[FileImage], source: tensors.WeightsSource, directory: Path
) -> tuple[list[FileEntry], Digests]:
    """Write all files into `directory`, durably. Return their entries and the parts' digests.

    Raises `OSError` if the storage fails, and `CheckpointError` if a file of the source changes
    meanwhile.
    """
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="import") as pool:
        written = list(pool.map(lambda image: _write(image, source, directory), images))
    check_unchanged(source)
    entries = [entry for entry, _ in written]
    return entries, {key: digest for _, digests in written for key, digest in digests.items()}


def check_unchanged(source: tensors.WeightsSource) -> None:
    """Raise `CheckpointError` if a file of the source has changed since it was opened."""
    files = tensors.SourceFiles(source.base, is_snapshot=source.is_snapshot)
    for path, state in source.files.items():
        os.close(files.open(path))
        if files.states[path] != state:
            raise CheckpointError(
                f"{source.base / path}: it changed while it was read; wait until its writer has "
                "finished, then import it again"
            )


def _write(
    image: FileImage, source: tensors.WeightsSource, directory: Path
) -> tuple[FileEntry, Digests]:
    """Write one file and return its entry, and the digests of its tensors."""
    place = directory / image.name
    handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, source.rights)
    digests: Digests = {}
    try:
        with _Reader(source) as reader:
            stream = _Stream(handle, image.length)
            for at, piece in image.pieces():
                stream.pad_to(at)
                if isinstance(piece, bytes):
                    stream.put(memoryview(piece))
                    continue
                digest = new_checksum()
                for fill in reader.fills(piece):
                    stream.take(fill.bytes, fill, digest)
                digests[piece.name, piece.offsets] = digest.hexdigest()
            stream.finish()
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileEntry.of(image.name, image.length, stream.checksum), digests


class _Stream:
    """A file that is written from its start, through one piece of memory."""

    def __init__(self, handle: int, size: int) -> None:
        self._output, self._size = DirectFile(handle, size), size
        self._memory = huge_memory(PIECE_BYTES)
        self._at = self._filled = 0
        self.checksum = FileChecksum(size)

    def pad_to(self, position: int) -> None:
        """Write zeros up to `position`. They separate entries, so there are at most a few."""
        self.put(memoryview(bytes(position - self._at)))

    def put(self, content: memoryview) -> None:
        while content:
            room = self._room()
            count = min(len(room), len(content))
            room[:count] = content[:count]
            self._took(count)
            content = content[count:]

    def take(self, size: int, fill: Fill, digest: RunningDigest) -> None:
        """Write `size` bytes that `fill` reads into memory, from its position 0 on."""
        done = 0
        while done < size:
            room = self._room()[: size - done]
            fill(done, room)
            digest.update(room)
            self._took(len(room))
            done += len(room)

    def finish(self) -> None:
        self._flush()
        assert self._at == self._size

    def _room(self) -> memoryview:
        if self._filled == len(self._memory):
            self._flush()
        return self._memory[self._filled :]

    def _took(self, count: int) -> None:
        self._filled += count
        self._at += count

    def _flush(self) -> None:
        content = self._memory[: self._filled]
        self.checksum.update(content)
        self._output.write(content)
        self._filled = 0


class Fill(Protocol):
    """Reads some bytes of a source: call it with a position and the memory to fill."""

    bytes: int

    def __call__(self, start: int, memory: memoryview) -> None: ...


class _Run:
    """Consecutive bytes of a file."""

    def __init__(self, handle: int, segment: tensors.ByteSegment, place: Path) -> None:
        self.bytes = segment.bytes
        self._handle, self._segment, self._place = handle, segment, place

    def __call__(self, start: int, memory: memoryview) -> None:
        at = self._segment.offset + start
        while memory:
            count = reading.read_again(partial(os.preadv, self._handle, [memory], at))
            if count == 0:
                raise CheckpointError(
                    f"{self._place}: it ends at byte {at}, expected more; it was cut short while "
                    "it was read. Import it again"
                )
            memory, at = memory[count:], at + count


class _Gather:
    """Elements of a file in another order, which a view with strides puts into row-major order.

    The file is mapped, so only the pages that are used are in memory.
    """

    def __init__(self, handle: int, part: tensors.SourcePart) -> None:
        (segment,) = part.segments
        item = part.dtype.itemsize
        self.bytes, self._item = part.bytes, item
        begin = segment.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = segment.offset + segment.bytes - begin
        self._mapped = mmap.mmap(handle, length, access=mmap.ACCESS_READ, offset=begin)
        raw = np.frombuffer(self._mapped, np.uint8)[segment.offset - begin :]
        steps = tuple(step * item for step in (part.strides or ()))
        # The last dimension is the bytes of one element.
        self._view = as_strided(raw, (*part.sizes, item), (*steps, 1), writeable=False)

    def __call__(self, start: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            first, skipped = divmod(start + done, self._item)
            last = min(first + ELEMENTS_MAX, -(-(start + len(memory)) // self._item))
            found = _elements(self._view, first, last)[skipped : skipped + len(memory) - done]
            memory[done : done + len(found)] = found
            done += len(found)


def _elements(view: npt.NDArray[np.uint8], first: int, last: int) -> memoryview:
    """Return the bytes of elements `first` to `last`, counted in row-major order."""
    numbers = np.unravel_index(np.arange(first, last), view.shape[:-1])
    return memoryview(view[numbers].tobytes())


class _Reader:
    """The open files of a source."""

    def __init__(self, source: tensors.WeightsSource) -> None:
        self._files = tensors.SourceFiles(source.base, is_snapshot=source.is_snapshot)
        self._handles: dict[str, int] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def fills(self, part: tensors.SourcePart) -> Iterator[Fill]:
        if part.strides is not None:
            yield _Gather(self._handle(part.segments[0].path), part)
            return
        for segment in part.segments:
            yield _Run(self._handle(segment.path), segment, self._files.base / segment.path)

    def _handle(self, path: str) -> int:
        if path not in self._handles:
            self._handles[path] = self._files.open(path)
        return self._handles[path]


REASON: Final = "import"


def import_into(run: RunPaths, uid: str, source: tensors.WeightsSource) -> dict[str, Any]:
    """Commit the weights of `source` as the checkpoint `IMPORTED` of a run; return the facts.

    The checkpoint must not exist yet. Raises `CheckpointError` and `OSError` as the parts do. No
    file is left then.
    """
    directory = run.checkpoint(IMPORTED)
    durable.make_directory(directory)
    began = time.time()
    try:
        images = plan_images(source.parts)
        entries, digests = write_images(images, source, directory)
        origin = {
            "path": str(source.place),
            "format": source.form,
            "bytes": source.bytes,
            "tensors": len({part.name for part in source.parts}),
            "digest": digest_of_tensors(source, digests),
        }
        for name, content in (
            (metadata.METADATA, encode_metadata(images)),
            (TRAIN_STATE, durable.to_json(document_of(origin))),
        ):
            durable.write_bytes(directory / name, content, mode=source.rights)
            checksum = FileChecksum(len(content))
            checksum.update(content)
            entries.append(FileEntry.of(name, len(content), checksum))
        durable.fsync_directory(directory)
        manifest = commit_alone(run, directory, _make_part(run, uid, entries, began))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return {**origin, "checkpoint": manifest.name, "left_out": list(source.left_out)}


def digest_of_tensors(source: tensors.WeightsSource, digests: Digests) -> str:
    """Return the SHA-256 of all names, types, shapes and bytes, whatever files they come from."""
    return document_digest(
        sorted(
            [part.name, str(part.dtype), list(part.shape), list(part.offsets), digest]
            for part in source.parts
            for digest in [digests[part.name, part.offsets]]
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if committed, 1 if the source is bad or a write failed, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.trainer.importing", description=__doc__
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--uid", required=True)
    parser.add_argument("--form", choices=find.FORMS, default=find.AUTO)
    parser.add_argument("--rename", action="append", type=_rule, default=[])
    parser.add_argument("--exclude", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    # The caller cancelled the import. The exit removes the partial checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        source = find.open_source(given.source, given.form)
        parts = tensors.select(
            source.parts, rename=dict(given.rename), exclude=given.exclude, where=source.place
        )
        facts = import_into(RunPaths(given.run), given.uid, replace(source, parts=tuple(parts)))
    except CheckpointError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"holdfast: {given.run}: not written: {error}", file=sys.stderr)
        return 1
    print(
        json.dumps(facts)
        if given.json
        else f"{facts['checkpoint']}: {counted(facts['tensors'], 'tensor')}"
    )
    return 0


def _make_part(
    run: RunPaths, uid: str, entries: Sequence[FileEntry], began: float
) -> dict[str, Any]:
    """Return what the commit needs, as a node that flushed a step would give it."""
    return {
        "node": 0,
        "nodes": 1,
        "world_size": 1,
        "ranks": [0],
        "files": [entry.model_dump(mode="json") for entry in entries],
        "blocked_s": 0.0,
        "staged_at": began,
        "fsynced_at": time.time(),
        "manifest": {
            "run_uid": uid,
            "run": run.name,
            "name": str(IMPORTED),
            "step": IMPORTED.step,
            "attempt": IMPORTED.attempt,
            "launch": IMPORTED.launch,
            "world_size": 1,
            "reason": REASON,
            "versions": versions(),
        },
    }


def _rule(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"{text}: expected OLD=NEW, such as encoder.*=model.*")
    return old, new


if __name__ == "__main__":
    sys.exit(main())
