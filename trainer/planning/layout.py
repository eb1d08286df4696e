"""The layout of a rank's checkpoint files: planned once and valid for every later save.

A rank's image is the content of a staging slot: its `.distcp` file and, on some ranks, `.metadata`
and `train_state.json`. A tensor's entry is the zip that `torch.save` writes. Its headers and
footers are fixed, and its bytes begin on a 64-byte boundary of the file. A number's entry is such a
zip too. The zip's comment field pads it to a length that later values share, so `.metadata` stays
the same from save to save.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.contracts.errors import SaveError
from holdfast.contracts.paths import TRAIN_STATE
from holdfast.trainer.planning.global_plan import offsets_of
from holdfast.trainer.planning.metadata import METADATA

FILE_ALIGNMENT: Final = 4096
TRAIN_STATE_BYTES_MAX: Final = 16 * 1024 * 1024
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22
_NUMBERS: Final = frozenset({bool, int, float, str, type(None)})
# Every value of these types fits the same place.
_OF_ONE_SIZE: Final = _NUMBERS - {str}
_LEAF_TYPES: Final = _NUMBERS | {torch.Tensor, torch.nn.Parameter, DTensor}
_KEYS_SHOWN: Final = 5
# A list of numbers has space for the next power of two, or above LIST_STEP the next multiple of it.
LIST_LEAST: Final = 16
LIST_STEP: Final = 2048
# The bytes that one more number in a list may need.
LIST_ENTRY_BYTES: Final = 12
_LIST: Final = "list"
# The same for a text, or all texts of a list together. A zip comment can pad more than one step.
TEXT_LEAST_BYTES: Final = 256
TEXT_STEP_BYTES: Final = 16384
_TEXT: Final = "text"


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


@dataclass(frozen=True)
class FilePlace:
    """One file of the image. `path` is relative to the checkpoint's directory."""

    path: str
    offset: int
    bytes: int


class LateContent(Protocol):
    """A constant part of an image that takes time to build. Its length is known at once."""

    @property
    def bytes(self) -> int: ...

    def write_to(self, memory: memoryview, is_over: Callable[[], bool]) -> None:
        """Write it into `memory`, which has `bytes` bytes. May stop once `is_over()` is true."""


@dataclass(frozen=True)
class Layout:
    """A rank's image. `fixed` are the constant headers and footers: (offset, bytes).

    `late` is constant too, but a background thread builds it: (offset, content).
    """

    signature: Signature
    tensors: tuple[TensorPlace, ...]
    numbers: tuple[NumberPlace, ...]
    fixed: tuple[tuple[int, bytes], ...]
    files: tuple[FilePlace, ...]
    image_bytes: int
    late: tuple[int, LateContent] | None = None
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
class Template:
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
    template: Template

    @property
    def length(self) -> int:
        """Bytes of the entry in the file."""
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


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with nested keys joined by dots, as DCP names them.

    Raises `SaveError` with the name of a leaf that is neither a tensor nor a plain value.
    """
    flat: dict[str, Any] = {}
    _flatten_into(flat, "", state)
    return flat


def _flatten_into(
    flat: dict[str, Any], prefix: str, container: Mapping[str, Any] | list[Any]
) -> None:
    """Add the leaves with their names. As in DCP, a list is a leaf unless it holds tensors."""
    entries = container.items() if isinstance(container, Mapping) else enumerate(container)
    for name, value in entries:
        key = f"{prefix}{name}"
        # A fast path for nearly all leaves, because every save runs this loop.
        if type(value) not in _LEAF_TYPES:
            if isinstance(value, Mapping) or (type(value) is list and _is_nested(value)):
                _flatten_into(flat, f"{key}.", value)
                continue
            if not isinstance(value, torch.Tensor) and not is_plain(value):
                raise SaveError(
                    f"{key}: a {type(value).__name__} cannot be saved as checkpoint state. "
                    "Expected a tensor, or a bool, int, float, str or None of an optimizer's "
                    "parameter group. Make it a tensor, or put it into the train state as JSON"
                )
        if key in flat:
            raise SaveError(f"two entries have the name {key} when joined by dots; rename one")
        flat[key] = value


def _is_nested(entries: Sequence[Any]) -> bool:
    return any(
        isinstance(entry, (torch.Tensor, Mapping)) or (type(entry) is list and _is_nested(entry))
        for entry in entries
    )


class Signature:
    """What a plan depends on, by key: types, shapes and placements, but no values."""

    def __init__(self, flat: Mapping[str, Any]) -> None:
        self._prints = {key: _fingerprint(value) for key, value in flat.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._prints == other._prints

    __hash__ = None  # type: ignore[assignment]

    def fits(self, flat: Mapping[str, Any]) -> bool:
        """Return True if `flat` still fits the plan. Costs at most a microsecond per key."""
        prints = self._prints
        if flat.keys() != prints.keys():
            return False
        return all(
            prints[key] is None
            if type(value) in _OF_ONE_SIZE
            else _fingerprint(value) == prints[key]
            for key, value in flat.items()
        )

    def differences(self, flat: Mapping[str, Any]) -> list[str]:
        """Return a readable line for each key that differs."""
        now = {key: _fingerprint(value) for key, value in flat.items()}
        return [
            f"{key}: {_describe(now, key, 'missing')}, planned "
            f"{_describe(self._prints, key, 'nothing')}"
            for key in sorted({*now, *self._prints})
            if key not in now or key not in self._prints or now[key] != self._prints[key]
        ]


def find_changes(layout: Layout, flat: Mapping[str, Any]) -> str | None:
    """Describe what of `flat` no longer fits `layout`, with a few keys, or return None."""
    if layout.signature.fits(flat):
        return None
    changed = layout.signature.differences(flat)
    more = f" and {len(changed) - _KEYS_SHOWN} more" if len(changed) > _KEYS_SHOWN else ""
    return "; ".join(changed[:_KEYS_SHOWN]) + more


def check_unchanged(layout: Layout, flat: Mapping[str, Any]) -> None:
    """Raise `SaveError` with the changes if `flat` no longer fits `layout`."""
    changes = find_changes(layout, flat)
    if changes is not None:
        raise SaveError(
            f"the state differs from the planned one: {changes}. If you changed it on purpose, "
            "call prepare(state) on all ranks, then save"
        )


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's own part of a tensor, detached."""
    if isinstance(value, DTensor):
        # Without a gradient to record, to_local does nothing else.
        return value._local_tensor.detach()
    if isinstance(value, ShardedTensor):
        part: torch.Tensor = value.local_shards()[0].tensor.detach()
        return part
    return value.detach()


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
        image_bytes=_align(end, FILE_ALIGNMENT),
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
        image_bytes=_align(at + size, FILE_ALIGNMENT),
    )


def add_train_state(layout: Layout) -> Layout:
    """Return the image with space for `train_state.json` at its end.

    The space is address space. Only the bytes that are written take memory.
    """
    at = layout.image_bytes
    return replace(layout, image_bytes=at + TRAIN_STATE_BYTES_MAX, train_state_at=at)


def files_of(layout: Layout, train_state_bytes: int | None) -> list[FilePlace]:
    """Return the files of one save. `train_state.json` has the length that it has this time."""
    files = list(layout.files)
    if layout.train_state_at is not None and train_state_bytes is not None:
        files.append(FilePlace(TRAIN_STATE, layout.train_state_at, train_state_bytes))
    return files


def encode_number(value: Any, length: int | None = None, key: str = "") -> bytes:
    """Return `value` as `torch.save` writes it, padded to `length` bytes by the zip's comment.

    Raises `SaveError` with `key` if it is longer than that.
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
            f"{key}: its {type(value).__name__} needs {len(content)} bytes, but its place in the "
            f"checkpoint has {length}; expected a number of a fixed size. Save growing data as "
            "text, as a list of numbers or as a tensor"
        )
    return content[:-2] + struct.pack("<H", padding) + bytes(padding)


def make_template(shape: torch.Size, dtype: torch.dtype, *, crc: bool = False) -> Template:
    """Return the zip of a tensor without touching its memory, so no pages are written.

    With `crc` its small parts have their CRC32, as stock DCP writes them.
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


def _fingerprint(value: Any) -> tuple[Any, ...] | None:
    """Return what a plan depends on of one value, None for any number."""
    if isinstance(value, DTensor):
        local = value._local_tensor
        return (value._spec, local.dtype, local.shape)
    if isinstance(value, ShardedTensor):
        return (value.metadata(), None, None)
    if isinstance(value, torch.Tensor):
        return (None, value.dtype, value.shape)
    if isinstance(value, str):
        room = _text_capacity(value)
        return (_TEXT, None, room) if room > TEXT_LEAST_BYTES else None
    if isinstance(value, list | tuple):
        count, room = capacity_of(value), _text_capacity(*_texts_of(value))
        if room > TEXT_LEAST_BYTES:
            return (_LIST, room, count)
        return (_LIST, None, count) if count > LIST_LEAST else None
    return None


def capacity_of(numbers: Sequence[Any]) -> int:
    """Return how many numbers the entry of such a list has space for, so that it may grow."""
    return _capacity(len(numbers), LIST_LEAST, LIST_STEP)


def room_of(value: Any) -> int:
    """Return the bytes by which a text or a list may still grow without a new plan."""
    if isinstance(value, str):
        return _text_capacity(value) - _text_bytes(value)
    if isinstance(value, list | tuple):
        texts = _texts_of(value)
        more = _text_capacity(*texts) - _text_bytes(*texts)
        return (capacity_of(value) - len(value)) * LIST_ENTRY_BYTES + more
    return 0


def _texts_of(values: Sequence[Any]) -> list[str]:
    return [value for value in values if type(value) is str]


def _text_bytes(*texts: str) -> int:
    return sum(
        len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts
    )


def _text_capacity(*texts: str) -> int:
    return _capacity(_text_bytes(*texts), TEXT_LEAST_BYTES, TEXT_STEP_BYTES)


def _capacity(count: int, least: int, step: int) -> int:
    """Return the next power of two, or above `step` the next multiple of it; at least `least`."""
    if count > step:
        return _align(count, step)
    return max(least, 1 << (count - 1).bit_length() if count else 0)


def is_wrapper(part: torch.Tensor) -> bool:
    """Return True for a tensor made of others, unless of a single one with its shape and type."""
    if isinstance(part, DTensor) or not is_traceable_wrapper_subclass(part):
        return False
    attributes, _ = part.__tensor_flatten__()
    inner = [getattr(part, name) for name in attributes]
    return len(inner) != 1 or (inner[0].shape, inner[0].dtype) != (part.shape, part.dtype)


def _describe(prints: Mapping[str, tuple[Any, ...] | None], key: str, absent: str) -> str:
    if key not in prints:
        return absent
    found = prints[key]
    if found is None:
        return "a number or a short text"
    spec, dtype, shape = found
    if spec == _TEXT:
        return f"a text of up to {shape} bytes"
    if spec == _LIST:
        texts = f", with texts of up to {dtype} bytes" if dtype else ""
        return f"a list of up to {shape} numbers{texts}"
    if dtype is None:
        return f"a sharded tensor of {tuple(spec.size)}"
    where = "" if spec is None else f"{tuple(spec.shape)} {spec.placements} here "
    return f"{dtype} {where}{tuple(shape)}"


def is_plain(value: Any) -> bool:
    """Return True for what a parameter group holds: numbers, texts, and lists of them (betas)."""
    if type(value) in (list, tuple):
        return all(type(entry) in _NUMBERS for entry in value)
    return type(value) in _NUMBERS


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
