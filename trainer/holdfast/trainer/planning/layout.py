"""The layout of a rank's checkpoint files: planned once and valid for every later save.

A rank's image is the content of a staging slot: its `.distcp` file and, on some ranks, `.metadata`
and `train_state.json`. A tensor's entry is the zip that `torch.save` writes. Its headers and
footers are fixed, and its bytes begin on a 64-byte boundary of the file. A number's entry is such a
zip too. The zip's comment field pads it to a length that later values share, so `.metadata` stays
the same from save to save. `train_state.json` is of limited size.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.contracts.disk import durable, paths
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.errors import DamagedCheckpointError, SaveError
from holdfast.trainer.format.metadata import METADATA, read_verified
from holdfast.trainer.format.opcodes import STORAGE_META_BYTES_MAX
from holdfast.trainer.planning.global_plan import offsets_of
from holdfast.trainer.planning.signature import Encoded, Signature
from holdfast.trainer.process import devices
from holdfast.trainer.slots.slot_table import FilePlace

FILE_ALIGNMENT: Final = 4096
# From this size on, a tensor of a plan is a mapping instead of memory, which takes longer to make.
MAPPED_BYTES_MIN: Final = 64 * 1024 * 1024
TRAIN_STATE_BYTES_MAX: Final = 16 * 1024 * 1024
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22


@dataclass(frozen=True)
class TensorPlace:
    """One tensor's bytes: `at` is the offset in the image, `shape` that of the rank's own part."""

    key: str
    at: int
    bytes: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class NumberPlace:
    """One number's entry. `bytes` is its length at every save."""

    key: str
    at: int
    bytes: int


class LateContent(Protocol):
    """A constant part of an image that takes time to build. Its length is known before."""

    @property
    def bytes(self) -> int: ...

    def write_to(self, memory: memoryview, is_over: Callable[[], bool]) -> None:
        """Write it into `memory`, which has `bytes` bytes. May stop once `is_over()` is true."""


@dataclass(frozen=True)
class Layout:
    """A rank's image. `fixed` are the constant headers and footers: (offset, bytes).

    `late` is constant too, but a background thread builds it: (offset, content). At `metadata_end`,
    where `.metadata` ends, is space for its `storage_meta`.
    """

    signature: Signature
    tensors: tuple[TensorPlace, ...]
    numbers: tuple[NumberPlace, ...]
    fixed: tuple[tuple[int, bytes], ...]
    files: tuple[FilePlace, ...]
    image_bytes: int
    late: tuple[int, LateContent] | None = None
    metadata_end: int | None = None
    train_state_at: int | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of the image that every save fills: all except the space for the train state."""
        return self.image_bytes if self.train_state_at is None else self.train_state_at

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that this rank writes, in file order. Keys that only it has come last."""
        places: list[TensorPlace | NumberPlace] = [*self.tensors, *self.numbers]
        return tuple(place.key for place in sorted(places, key=lambda place: place.at))


@dataclass(frozen=True)
class TensorTemplate:
    """The zip of a tensor of one shape and type, without the tensor's bytes."""

    pieces: tuple[tuple[int, bytes], ...]
    data_at: int
    length: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's part to write. `shape` is that of the rank's own part."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    template: TensorTemplate

    @property
    def length(self) -> int:
        return self.template.length


@dataclass(frozen=True)
class NumberEntry:
    """One number to write, and the bytes of its entry at every save."""

    key: str
    length: int


class _Recorder:
    """A file object for `torch.save` that keeps what is written and records what is skipped."""

    def __init__(self) -> None:
        self._position = 0
        self.pieces: list[tuple[int, bytearray]] = []
        self.data_at = 0

    def write(self, content: bytes | memoryview) -> int:
        piece = bytes(content)
        last = self.pieces[-1] if self.pieces else None
        if last and last[0] + len(last[1]) == self._position:
            last[1].extend(piece)
        else:
            self.pieces.append((self._position, bytearray(piece)))
        self._position += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Skip a storage. `torch.save` calls it only for this, from the current position."""
        assert whence == io.SEEK_CUR
        self.data_at = self._position
        self._position += offset
        return self._position

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def tell(self) -> int:
        return self._position


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's own part of a tensor, detached."""
    if isinstance(value, DTensor):
        # Without a gradient to record, to_local does nothing else.
        return value._local_tensor.detach()
    if isinstance(value, ShardedTensor):
        part: torch.Tensor = value.local_shards()[0].tensor.detach()
        return part
    return value.detach()


def local_parts(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's own part of each tensor. Plain ones are the tensors themselves."""
    # Not by a function for nearly all values, because every save runs this loop.
    return [
        value
        if type(value) is torch.Tensor
        else value._local_tensor
        if type(value) is DTensor
        else local_part(value)
        for value in values
    ]


def plan_layout(
    path: str, entries: Sequence[TensorEntry | NumberEntry], signature: Signature
) -> Layout:
    """Return the image of one `.distcp` file, named `path`, that holds `entries` in order."""
    lengths = np.array([entry.length for entry in entries], dtype=np.int64)
    tensors, numbers, fixed, end = [], [], [], 0
    for entry, start in zip(entries, offsets_of(lengths).tolist(), strict=True):
        if isinstance(entry, NumberEntry):
            numbers.append(NumberPlace(entry.key, start, entry.length))
        else:
            template, shape, dtype = entry.template, entry.shape, entry.dtype
            size = shape.numel() * dtype.itemsize
            tensors.append(TensorPlace(entry.key, start + template.data_at, size, shape, dtype))
            fixed += [(start + at, piece) for at, piece in template.pieces]
        end = start + entry.length
    return Layout(
        signature=signature,
        tensors=tuple(tensors),
        numbers=tuple(numbers),
        fixed=tuple(fixed),
        files=(FilePlace(path, 0, end),) if end else (),
        image_bytes=align(end, FILE_ALIGNMENT),
    )


def add_metadata(layout: Layout, metadata: bytes | LateContent, folder: str = "") -> Layout:
    """Return the image with `.metadata` after its own file, in `folder` of the checkpoint."""
    at = layout.image_bytes
    if isinstance(metadata, bytes):
        size = len(metadata)
        layout = replace(layout, fixed=(*layout.fixed, (at, metadata)))
    else:
        size = metadata.bytes
        layout = replace(layout, late=(at, metadata))
    return replace(
        layout,
        files=(*layout.files, FilePlace(f"{folder}{METADATA}", at, size)),
        metadata_end=at + size,
        # Appended for each save, so that `.metadata` itself stays the same, see `opcodes`.
        image_bytes=align(at + size + STORAGE_META_BYTES_MAX, FILE_ALIGNMENT),
    )


def add_train_state(layout: Layout) -> Layout:
    """Return the image with space for `train_state.json` at its end.

    The space is address space. Only the bytes that are written take memory.
    """
    at = layout.image_bytes
    return replace(layout, image_bytes=at + TRAIN_STATE_BYTES_MAX, train_state_at=at)


def files_of(
    layout: Layout, train_state_bytes: int | None, storage_meta: bytes = b""
) -> list[FilePlace]:
    """Return the files of one save. Two of them have the length that they have this time."""
    files = list(layout.files)
    if storage_meta and layout.metadata_end is not None:
        # It replaces the last byte of `.metadata`, the last one of these files.
        files[-1] = replace(files[-1], bytes=files[-1].bytes + len(storage_meta) - 1)
    if layout.train_state_at is not None and train_state_bytes is not None:
        files.append(FilePlace(paths.TRAIN_STATE, layout.train_state_at, train_state_bytes))
    return files


def encode(value: Any) -> bytes:
    """Return `value` as `torch.save` writes it. Raises what that raises for the value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def is_padded_by_comment(content: bytes) -> bool:
    """Return True for a zip without a comment, whose length a comment can increase."""
    return content[-_ZIP_END_BYTES:].startswith(_ZIP_END)


def encode_number(value: Any, length: int | None = None, key: str = "") -> bytes:
    """Return `value` as `torch.save` writes it, padded to `length` bytes by the zip's comment.

    Raises `SaveError` with `key` if it is longer than that.
    """
    content = value.content if isinstance(value, Encoded) else encode(value)
    if length is None or length == len(content):
        return content
    # Only torch's zip can end in a comment that readers skip.
    assert is_padded_by_comment(content)
    padding = length - len(content)
    if padding < 0:
        raise SaveError(
            f"{key}: its {type(value).__name__} needs {len(content)} bytes, but its place in the "
            f"checkpoint has {length}; expected a number of a fixed size. Save growing data as "
            "text, as a list of numbers or as a tensor"
        )
    # The last two bytes of a zip without a comment are the comment's length, which is 0.
    return content[:-2] + struct.pack("<H", padding) + bytes(padding)


def make_template(shape: torch.Size, dtype: torch.dtype, *, crc: bool = False) -> TensorTemplate:
    """Return the zip of a tensor, without memory for it.

    With `crc` its small parts have their CRC32, as stock DCP writes them.
    """
    recorder = _Recorder()
    # A process-wide setting of torch, restored below: the program may use its own.
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc)
    try:
        with torch.serialization.skip_data(), _without_memory(shape, dtype) as tensor:
            torch.save(tensor, recorder)  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(checksums)
    pieces = tuple((at, bytes(piece)) for at, piece in recorder.pieces)
    return TensorTemplate(pieces, recorder.data_at, recorder.tell())


@contextlib.contextmanager
def _without_memory(shape: torch.Size, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Return a tensor whose values must not be read. It takes address space, and no memory.

    A mapping that cannot be written needs no memory in any mode of the kernel, so a plan may have
    chunks that are larger than this machine.
    """
    size = shape.numel() * dtype.itemsize
    if size < MAPPED_BYTES_MIN:
        yield torch.empty(shape, dtype=dtype, device=devices.CPU)
        return
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        # As memory that can be written, or torch warns.
        memory = (ctypes.c_uint8 * size).from_address(address)
        yield torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@functools.cache
def has_form(dtype: torch.dtype) -> bool:
    """Return True if torch can write a tensor of this type."""
    try:
        make_template(torch.Size((1,)), dtype)
    except (KeyError, RuntimeError):
        return False
    return True


def is_wrapper(part: torch.Tensor) -> bool:
    """Return True for a tensor made of others, unless of a single one with its shape and type."""
    if isinstance(part, DTensor):
        return False
    if not is_traceable_wrapper_subclass(part):
        return _lacks_memory(part)
    attributes, _ = part.__tensor_flatten__()
    inner = [getattr(part, name) for name in attributes]
    return len(inner) != 1 or (inner[0].shape, inner[0].dtype) != (part.shape, part.dtype)


def inner_names(part: torch.Tensor) -> str:
    """Return the names of a wrapper's inner tensors; '' if its class does not tell them."""
    if not is_traceable_wrapper_subclass(part):
        return ""
    return ", ".join(part.__tensor_flatten__()[0])


def _lacks_memory(part: torch.Tensor) -> bool:
    """Return True for a tensor of a subclass that holds its values elsewhere.

    A subclass need not have `__tensor_flatten__`, which names the inner tensors.
    """
    if type(part) in {torch.Tensor, torch.nn.Parameter} or part.is_meta or not part.numel():
        return False
    try:
        return part.layout is torch.strided and part.untyped_storage().data_ptr() == 0
    except RuntimeError:
        # torch refuses to name the memory of such a tensor.
        return True


def align(offset: int, alignment: int) -> int:
    """Return the first multiple of `alignment` from `offset` on."""
    return -(-offset // alignment) * alignment


def encode_train_state(document: Mapping[str, Any]) -> bytes:
    """Return the content of the file. Raises `SaveError` if it is too large or not JSON.

    Text is kept to the code point, so lone surrogates too, which other documents replace.
    """
    try:
        content = durable.to_json(dict(document), surrogates="backslashreplace")
    except (TypeError, ValueError) as error:
        raise SaveError(
            f"the train state is not JSON: {error}; put tensors into the state. The train "
            "state takes numbers, text, lists and mappings"
        ) from error
    if len(content) > TRAIN_STATE_BYTES_MAX:
        raise SaveError(
            f"the train state is {len(content)} bytes of JSON, expected "
            f"{TRAIN_STATE_BYTES_MAX} or less; put large data into the state as tensors"
        )
    return content


def read_train_state(directory: Path, manifest: Manifest | None) -> dict[str, Any]:
    """Return the train state of the checkpoint in `directory`, or {} if stock DCP wrote it.

    `manifest` is the checkpoint's, or None for stock DCP. Raises `DamagedCheckpointError` if the
    train state differs from the manifest, cannot be read, or is not a JSON object.
    """
    path = directory / paths.TRAIN_STATE
    listed = manifest is not None and any(file.path == paths.TRAIN_STATE for file in manifest.files)
    if not listed and not path.exists():
        return {}
    try:
        # Through the manifest: the file of another user may have changed since the commit.
        content = read_verified(directory, paths.TRAIN_STATE, manifest, TRAIN_STATE_BYTES_MAX)
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path}: not JSON: {error}; resume from another checkpoint",
            damaged=[f"{paths.TRAIN_STATE}: {error}"],
        ) from error
    if not isinstance(parsed, dict):
        raise DamagedCheckpointError(
            f"{path}: contains a {type(parsed).__name__}, expected a JSON object; resume from "
            "another checkpoint",
            damaged=[f"{paths.TRAIN_STATE}: a {type(parsed).__name__}"],
        )
    return parsed
