"""Where every byte of a rank's checkpoint files lies: planned once, true for every save after.

A rank's image is what a staging slot holds: its `.distcp` file and, on rank 0, `.metadata` and
`train_state.json`. Stock DCP plans who writes what; the places are ours. A tensor's entry is the
zip that `torch.save` makes, headers and footers fixed, its bytes on a 64-byte boundary of the
file. A number's entry is such a zip too, padded by its own comment field to a length that later
values share, so that `.metadata` stays as it is from save to save.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from holdfast.contracts.errors import SaveError
from holdfast.contracts.paths import TRAIN_STATE
from holdfast.trainer.metadata import METADATA

ALIGNMENT: Final = 64
FILE_ALIGNMENT: Final = 4096
NUMBER_ROOM_BYTES: Final = 192
TRAIN_STATE_BYTES_MAX: Final = 16 * 1024 * 1024
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22
_NUMBERS: Final = (bool, int, float, str, type(None))
_KEYS_SHOWN: Final = 5


@dataclass(frozen=True)
class TensorPlace:
    """One tensor's bytes: `at` is the offset in the image, `shape` the rank's own part."""

    key: str
    at: int
    bytes: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class NumberPlace:
    """One number's entry: `bytes` is its length at every save."""

    key: str
    at: int
    bytes: int


@dataclass(frozen=True)
class FilePlace:
    """One file of the image; `path` is relative to the checkpoint's directory."""

    path: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """A rank's image. `fixed` is what never changes: (offset, bytes) of headers and footers.

    `storage` says where each planned item lies in this rank's `.distcp` file.
    """

    signature: Mapping[str, str]
    tensors: tuple[TensorPlace, ...]
    numbers: tuple[NumberPlace, ...]
    fixed: tuple[tuple[int, bytes], ...]
    files: tuple[FilePlace, ...]
    storage: Mapping[MetadataIndex, _StorageInfo]
    image_bytes: int
    train_state_at: int | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of the image that are always filled: all but the room for the train state."""
        return self.image_bytes if self.train_state_at is None else self.train_state_at


@dataclass(frozen=True)
class Template:
    """The zip of a tensor of one shape and type, without the tensor's bytes."""

    pieces: tuple[tuple[int, bytes], ...]
    data_at: int
    length: int


class _Recorder:
    """Stands in for a file under `torch.save`: keeps what is written, notes what is skipped."""

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
        """Only ever called to leave room for a storage, from the current position on."""
        assert whence == io.SEEK_CUR
        self.data_at = self._position
        self._position += offset
        return self._position

    def flush(self) -> None:
        """Nothing is held back."""

    def tell(self) -> int:
        return self._position


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with nested keys joined by dots, as DCP names them.

    Raises `SaveError` naming a leaf that is neither a tensor nor a number of a parameter group.
    """
    flat: dict[str, Any]
    try:
        flat, _ = flatten_state_dict(dict(state))
    except ValueError as error:
        raise SaveError(f"two entries have one name when joined by dots: {error}") from error
    for key, value in flat.items():
        if not isinstance(value, torch.Tensor) and not _is_plain(value):
            raise SaveError(
                f"{key}: a {type(value).__name__} cannot be saved as checkpoint state; expected a "
                "tensor, or a bool, int, float, str or None of an optimizer's parameter group. "
                "Put anything else into the train state as JSON, or make it a tensor"
            )
    return flat


def describe(flat: Mapping[str, Any]) -> dict[str, str]:
    """What a layout depends on, key by key: shape, type and placement, or that it is a number."""
    return {key: _describe(value) for key, value in flat.items()}


def find_changes(layout: Layout, flat: Mapping[str, Any]) -> str | None:
    """What of `flat` no longer fits `layout`, a few keys by name; None when all of it fits."""
    now = describe(flat)
    if now == layout.signature:
        return None
    changed = [
        f"{key}: {now.get(key, 'gone')}, planned {layout.signature.get(key, 'nothing')}"
        for key in sorted({*now, *layout.signature})
        if now.get(key) != layout.signature.get(key)
    ]
    more = f" and {len(changed) - _KEYS_SHOWN} more" if len(changed) > _KEYS_SHOWN else ""
    return "; ".join(changed[:_KEYS_SHOWN]) + more


def check_unchanged(layout: Layout, flat: Mapping[str, Any]) -> None:
    """Raise `SaveError` naming what changed when `flat` no longer fits `layout`."""
    changes = find_changes(layout, flat)
    if changes is not None:
        raise SaveError(
            f"the state is not the one that was planned: {changes}. If it changed on purpose, "
            "call prepare(state) on all ranks, then save"
        )


def local_part(value: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a tensor, detached."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def plan_layout(plan: SavePlan, flat: Mapping[str, Any], rank: int) -> Layout:
    """The image of `rank`'s `.distcp` file for the items that the global plan gave it."""
    path = f"__{rank}_0.distcp"
    templates: dict[tuple[torch.Size, torch.dtype], Template] = {}
    tensors, numbers, fixed, storage, end = [], [], [], {}, 0
    for item in plan.items:
        start = _align(end, ALIGNMENT)
        if item.type is WriteItemType.BYTE_IO:
            key = item.index.fqn
            length = len(encode_number(flat[key])) + NUMBER_ROOM_BYTES
            numbers.append(NumberPlace(key, start, length))
        else:
            place, template = _place_tensor(item, start, templates)
            length = template.length
            tensors.append(place)
            fixed += [(start + at, piece) for at, piece in template.pieces]
        storage[item.index] = _StorageInfo(path, start, length)
        end = start + length
    files = (FilePlace(path, 0, end),) if end else ()
    return Layout(
        signature=describe(flat),
        tensors=tuple(tensors),
        numbers=tuple(numbers),
        fixed=tuple(fixed),
        files=files,
        storage=storage,
        image_bytes=_align(end, FILE_ALIGNMENT),
    )


def add_rank_zero_files(layout: Layout, metadata: bytes) -> Layout:
    """Rank 0's image: `.metadata` and room for `train_state.json` after its own file.

    The room is address space: memory is taken for the bytes that are written alone.
    """
    at = layout.image_bytes
    train_state_at = _align(at + len(metadata), FILE_ALIGNMENT)
    return Layout(
        signature=layout.signature,
        tensors=layout.tensors,
        numbers=layout.numbers,
        fixed=(*layout.fixed, (at, metadata)),
        files=(*layout.files, FilePlace(METADATA, at, len(metadata))),
        storage=layout.storage,
        image_bytes=train_state_at + TRAIN_STATE_BYTES_MAX,
        train_state_at=train_state_at,
    )


def files_of(layout: Layout, train_state_bytes: int | None) -> list[FilePlace]:
    """The files of one save, `train_state.json` at the length it has this time."""
    files = list(layout.files)
    if layout.train_state_at is not None and train_state_bytes is not None:
        files.append(FilePlace(TRAIN_STATE, layout.train_state_at, train_state_bytes))
    return files


def pickle_metadata(metadata: Metadata, storage: Mapping[MetadataIndex, _StorageInfo]) -> bytes:
    """The bytes of `.metadata`: DCP's global plan with the places of all ranks' items."""
    metadata.storage_data = dict(storage)
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def encode_number(value: Any, length: int | None = None) -> bytes:
    """`value` as `torch.save` writes it, padded to `length` bytes by the zip's comment.

    Raises `SaveError` when it is longer than that.
    """
    stream = io.BytesIO()
    torch.save(value, stream)
    content = stream.getvalue()
    assert content[-_ZIP_END_BYTES:].startswith(_ZIP_END)
    if length is None or length == len(content):
        return content
    padding = length - len(content)
    if padding < 0:
        raise SaveError(
            f"{value!r} takes {len(content)} bytes, its place in the layout has {length}; "
            "call prepare(state) on all ranks, then save"
        )
    return content[:-2] + struct.pack("<H", padding) + bytes(padding)


def _place_tensor(
    item: WriteItem, start: int, templates: dict[tuple[torch.Size, torch.dtype], Template]
) -> tuple[TensorPlace, Template]:
    data = item.tensor_data
    assert data is not None
    shape, dtype = data.chunk.sizes, data.properties.dtype
    template = templates.get((shape, dtype))
    if template is None:
        template = templates[shape, dtype] = make_template(shape, dtype)
    size = shape.numel() * dtype.itemsize
    return TensorPlace(item.index.fqn, start + template.data_at, size, shape, dtype), template


def make_template(shape: torch.Size, dtype: torch.dtype, *, crc: bool = False) -> Template:
    """The zip of a tensor, made without touching its memory: the pages are never written.

    With `crc` its small parts bear their CRC32, as stock DCP writes them.
    """
    recorder = _Recorder()
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc)
    try:
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), recorder)  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(checksums)
    pieces = tuple((at, bytes(piece)) for at, piece in recorder.pieces)
    return Template(pieces, recorder.data_at, recorder.tell())


def _describe(value: Any) -> str:
    if isinstance(value, DTensor):
        local = tuple(value.to_local().shape)
        return f"{value.dtype} {tuple(value.shape)} {value.placements} here {local}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return "a number"


def _is_plain(value: Any) -> bool:
    """True for what a parameter group holds: numbers, words, and lists of them (betas)."""
    if type(value) in (list, tuple):
        return all(type(entry) in _NUMBERS for entry in value)
    return type(value) in _NUMBERS


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
