"""The bytes that a rank wants from a checkpoint's files, and the memory that they are read into.

A tensor's saved chunk is inside a zip written by `torch.save`. The position of its bytes follows
from shape and type. This module makes the zip of the same tensor without data, and compares its
header with the header that is read. An entry in any other form is read completely and opened by
`torch.load`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from holdfast.contracts.disk.digests import digest_of
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError
from holdfast.trainer.format.metadata_check import tile
from holdfast.trainer.format.plain_load import load_plain
from holdfast.trainer.format.saved_boxes import NO_FILE, BoxTable, SavedBoxes, find_odd_stride
from holdfast.trainer.loading.plan import Chunk, CopySeries, overlap, series_between
from holdfast.trainer.planning.layout import is_wrapper, make_template
from holdfast.trainer.process import devices

Bytes = npt.NDArray[np.uint8]


class MemoryTarget:
    """Memory that bytes are read into, in any order and from several threads.

    The memory is allocated just before the first bytes. After the last bytes, `finish` gets the
    memory, which is then released.
    """

    def __init__(
        self, make: Callable[[], Bytes], finish: Callable[[Bytes], None] | None = None
    ) -> None:
        self._make, self._finish = make, finish
        self._memory: Bytes | None = None
        self._missing = 0
        self._lock = threading.Lock()

    @property
    def memory(self) -> Bytes:
        with self._lock:
            if self._memory is None:
                self._memory = self._make()
            return self._memory

    def expect(self, count: int) -> None:
        """Announce, before reading, that `count` more bytes will be read into this memory."""
        self._missing += count

    def took(self, count: int) -> None:
        """Record that `count` bytes have been read into this memory."""
        with self._lock:
            self._missing -= count
            done = self._missing == 0
        if done and self._finish is not None:
            self._finish(self.memory)
            self._memory = None


@dataclass(frozen=True)
class Want:
    """Bytes of the file `path`, and their destination."""

    path: str
    series: CopySeries
    target: MemoryTarget


@dataclass(frozen=True)
class TensorPart:
    """This rank's part of a tensor: the box `wanted` in `local`, saved as `dtype`."""

    key: str
    wanted: Chunk
    local: torch.Tensor
    dtype: torch.dtype
    target: MemoryTarget


class EntryPlace(NamedTuple):
    """Where an entry lies: the file, and bytes in it."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True)
class Piece:
    """Where one saved chunk overlaps a `TensorPart`, as `box`. `info` is its file entry."""

    part: TensorPart
    saved: Chunk
    box: Chunk
    info: EntryPlace


@dataclass(frozen=True)
class Header:
    """The header of a tensor's zip as it was read, and the accepted headers."""

    piece: Piece
    content: MemoryTarget
    expected: tuple[bytes, ...]

    @property
    def is_as_expected(self) -> bool:
        return self.content.memory.tobytes() in self.expected


@dataclass
class Wants:
    """All bytes that one rank wants. `distinct` maps a digest of each wanted box to its bytes.

    `devices` are those of the tensors that cannot be read into directly.
    """

    items: list[Want] = field(default_factory=list)
    headers: list[Header] = field(default_factory=list)
    wholes: list[tuple[Piece, MemoryTarget]] = field(default_factory=list)
    numbers: dict[str, MemoryTarget] = field(default_factory=dict)
    distinct: dict[str, int] = field(default_factory=dict)
    devices: set[torch.device] = field(default_factory=set)

    def add(self, path: str, series: CopySeries, target: MemoryTarget) -> None:
        target.expect(series.bytes)
        self.items.append(Want(path, series, target))


@torch.no_grad()
def collect(
    flat: Mapping[str, Any], saved: Mapping[str, dcp.STORAGE_TYPES], table: BoxTable
) -> Wants:
    """Return what this rank wants of a checkpoint that has every key of `flat`.

    Raises `DamagedCheckpointError` if `.metadata` lacks chunks, and `CheckpointError` for a tensor
    without memory to load into.
    """
    wants = Wants()
    for key, value in flat.items():
        entry = saved[key]
        if isinstance(entry, dcp.BytesStorageMetadata):
            place = _place(key, table, 0)
            wants.numbers[key] = _want_whole(wants, place)
            wants.distinct[digest_of(key.encode(errors="surrogatepass"))] = place.length
            continue
        for piece in _pieces_of(key, value, entry, table):
            if devices.is_streamed(piece.part.local.device):
                wants.devices.add(piece.part.local.device)
            _want_piece(wants, piece, is_raw=table.is_raw)
    return wants


def collect_wholes(pieces: list[Piece]) -> Wants:
    """Return the complete entries of pieces whose form was not as expected."""
    wants = Wants()
    for piece in pieces:
        wants.wholes.append((piece, _want_whole(wants, piece.info)))
    return wants


def place_whole(piece: Piece, content: MemoryTarget) -> None:
    """Open an entry that was read completely, and copy the wanted part into the tensor."""
    saved = load_plain(content.memory.tobytes())
    if isinstance(saved, torch.Tensor) and is_wrapper(saved):
        raise CheckpointError(
            f"{piece.part.key}: it was saved as a {type(saved).__name__}, whose inner tensors "
            f"cannot be loaded exactly; leave it out with exclude=[{piece.part.key!r}]"
        )
    if not isinstance(saved, torch.Tensor) or tuple(saved.size()) != piece.saved.sizes:
        found = tuple(saved.size()) if isinstance(saved, torch.Tensor) else type(saved).__name__
        raise DamagedCheckpointError(
            f"{piece.part.key}: its entry contains {found}, expected a tensor of "
            f"{piece.saved.sizes} as in .metadata; load another checkpoint",
            damaged=[f"{piece.part.key}: contains {found}"],
        )
    target = piece.part.local
    for dimension, (begin, size) in enumerate(zip(piece.box.offsets, piece.box.sizes, strict=True)):
        saved = saved.narrow(dimension, begin - piece.saved.offsets[dimension], size)
        target = target.narrow(dimension, begin - piece.part.wanted.offsets[dimension], size)
    target.copy_(saved)


def _pieces_of(
    key: str,
    value: torch.Tensor,
    entry: dcp.TensorStorageMetadata,
    table: BoxTable,
) -> list[Piece]:
    """Return the saved chunks that overlap this rank's parts of a tensor."""
    found = []
    for chunk in _chunks_here(key, value):
        part = _make_part(key, value, chunk, entry.properties.dtype)
        boxes, saved_boxes = [], table.by_key[key]
        for number in _overlapping(saved_boxes, part.wanted):
            begin, size = saved_boxes.offsets[number], saved_boxes.sizes[number]
            saved = Chunk(tuple(begin.tolist()), tuple(size.tolist()))
            box = overlap(saved, part.wanted)
            if box is not None:
                boxes.append((box.offsets, box.sizes))
                found.append(Piece(part, saved, box, _place(key, table, number)))
        if not tile(boxes, (part.wanted.offsets, part.wanted.sizes)):
            held = sum(prod(sizes) for _, sizes in boxes)
            raise DamagedCheckpointError(
                f"{key}: the saved chunks contain {held} of the {prod(part.wanted.sizes)} "
                "elements wanted, or some twice; the checkpoint is incomplete. Load another one",
                damaged=[f".metadata: {key}: its chunks do not cover the tensor exactly"],
            )
    return found


def _chunks_here(key: str, value: torch.Tensor) -> list[dcp.ChunkStorageMetadata]:
    """Return this rank's parts of a tensor, or none if the rank is not in its mesh."""
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return []
        if (problem := find_odd_stride(value)) is not None:
            raise CheckpointError(f"{key}: {problem}")
    return list(_create_chunk_list(value))


def _make_part(
    key: str, value: torch.Tensor, chunk: dcp.ChunkStorageMetadata, dtype: torch.dtype
) -> TensorPart:
    """Return a part with memory to load into: the tensor's own memory if possible."""
    local = find_tensor_shard(value, dcp.MetadataIndex(key, chunk.offsets)).detach()
    if local.is_meta:
        raise CheckpointError(
            f"{key}: it is on the meta device and has no memory to load into; call "
            "model.to_empty(device=…) before loading"
        )
    if local.layout is not torch.strided:
        raise CheckpointError(
            f"{key}: its layout is {local.layout}, expected a dense tensor to load into; load it "
            "into a dense tensor and convert that, or leave it out with exclude"
        )
    if is_wrapper(local):
        raise CheckpointError(
            f"{key}: in this program it is a {type(local).__name__}, whose inner tensors cannot "
            f"be loaded exactly; expected a dense tensor. Leave it out with exclude=[{key!r}]"
        )
    plain = (
        type(local) is torch.Tensor
        and local.device.type == "cpu"
        and local.is_contiguous()
        and not local.is_conj()
        and not local.is_neg()
    )
    if plain and local.dtype == dtype:
        return TensorPart(key, _chunk(chunk), local, dtype, MemoryTarget(lambda: _bytes_of(local)))

    def make() -> Bytes:
        if devices.is_streamed(local.device):
            return _bytes_of(devices.landing(local.shape, dtype))
        return _bytes_of(torch.empty(local.shape, dtype=dtype, device=devices.CPU))

    def finish(memory: Bytes) -> None:
        with torch.no_grad():
            local.copy_(torch.from_numpy(memory).view(dtype).view(local.shape))

    return TensorPart(key, _chunk(chunk), local, dtype, MemoryTarget(make, finish))


def _want_piece(wants: Wants, piece: Piece, *, is_raw: bool) -> None:
    """Want the exact bytes of a piece, or its complete entry if the entry has an unknown form.

    With `is_raw`, there is no entry around the bytes.
    """
    part, item_bytes = piece.part, piece.part.dtype.itemsize
    name = f"{part.key} {piece.box.offsets} {piece.box.sizes}"
    wants.distinct[digest_of(name.encode(errors="surrogatepass"))] = (
        prod(piece.box.sizes) * item_bytes
    )
    if is_raw:
        for series in series_between(piece.saved, part.wanted, item_bytes):
            wants.add(piece.info.relative_path, series.moved(piece.info.offset), part.target)
        return
    heads, data_at, length = form_of(piece.saved.sizes, part.dtype)
    if piece.info.length != length:
        wants.wholes.append((piece, _want_whole(wants, piece.info)))
        return
    path, at = piece.info.relative_path, piece.info.offset
    head = MemoryTarget(lambda: np.empty(data_at, np.uint8))
    wants.add(path, CopySeries(at, 0, data_at), head)
    wants.headers.append(Header(piece, head, heads))
    for series in series_between(piece.saved, part.wanted, item_bytes):
        wants.add(path, series.moved(at + data_at), part.target)


def _want_whole(wants: Wants, info: EntryPlace) -> MemoryTarget:
    content = MemoryTarget(lambda: np.empty(info.length, np.uint8))
    wants.add(info.relative_path, CopySeries(info.offset, 0, info.length), content)
    return content


@cache
def form_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[bytes, ...], int, int]:
    """Return (headers, position of the bytes, length) of the zip of a contiguous tensor.

    The headers are those of Holdfast and of stock DCP, which adds CRC32s of the small parts.
    """
    forms = [make_template(torch.Size(shape), dtype, crc=crc) for crc in (False, True)]
    heads = tuple(form.pieces[0][1][: form.data_at] for form in forms)
    return heads, forms[0].data_at, forms[0].length


def _overlapping(saved: SavedBoxes, wanted: Chunk) -> list[int]:
    """Return the rows of the saved boxes that have elements in common with `wanted`."""
    begin, size = np.array(wanted.offsets, np.int64), np.array(wanted.sizes, np.int64)
    low = np.maximum(saved.offsets, begin)
    high = np.minimum(saved.offsets + saved.sizes, begin + size)
    rows: list[int] = np.flatnonzero((high > low).all(axis=1)).tolist()
    return rows


def _place(key: str, table: BoxTable, row: int) -> EntryPlace:
    """Return where a box lies. Raises `DamagedCheckpointError` if it is unknown."""
    boxes = table.by_key[key]
    if (file := int(boxes.file[row])) == NO_FILE:
        raise DamagedCheckpointError(
            f"{key}: .metadata does not name the file that contains it; load another checkpoint",
            damaged=[f".metadata: {key}: no location"],
        )
    return EntryPlace(table.files[file], int(boxes.offset[row]), int(boxes.length[row]))


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    # A single element is contiguous at any stride, but a byte view needs stride 1.
    flat: Bytes = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def _chunk(chunk: dcp.ChunkStorageMetadata) -> Chunk:
    return Chunk(tuple(chunk.offsets), tuple(chunk.sizes))
