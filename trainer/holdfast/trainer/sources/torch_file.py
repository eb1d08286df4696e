"""Reads where the tensors of a `torch.save` file lie, without running code and without their bytes.

The file is a zip: a pickle, and one uncompressed record for each storage. The pickle is read by a
reader that builds plain values only. A tensor becomes a description of its bytes.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch._weights_only_unpickler import _get_allowed_globals
from torch.serialization import StorageType

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.format.plain_load import finder, plain_makers
from holdfast.trainer.format.plain_pickle import Maker, RefusedPickle, read_pickle
from holdfast.trainer.sources import tensors

PICKLE_BYTES_MAX: Final = 64 << 20
DIRECTORY_BYTES_MAX: Final = 32 << 20
# The keys under which training programs put the weights among other state.
WEIGHTS: Final = ("model", "state_dict", "module")
_HEADER_BYTES: Final = 30
_HEADER: Final = b"PK\x03\x04"
_PICKLE: Final = "data.pkl"
_BYTEORDER: Final = "byteorder"


@dataclass(frozen=True)
class Stored:
    """A dense tensor in a file: its elements begin at byte `offset`. Strides are in elements."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_contiguous(self) -> bool:
        return tensors.is_contiguous(self.sizes, self.strides)

    @property
    def extent(self) -> int:
        """The bytes from the first element to the end of the last one."""
        if 0 in self.sizes:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class _Storage:
    """A storage of `count` elements, whose bytes begin at `offset` in the file."""

    dtype: torch.dtype
    count: int
    offset: int


class Other:
    """An object whose content is not used: a sparse tensor, or a class of another program."""


class _Window(io.RawIOBase):
    """A part of an open file as a file object, for `zipfile`. One read has a limit."""

    def __init__(self, handle: int, start: int, size: int) -> None:
        super().__init__()
        self._handle, self._start, self._size, self._at = handle, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if begin + offset < 0:
            raise OSError("before the start of the file")
        self._at = begin + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if size < 0 else min(size, left)
        if count > DIRECTORY_BYTES_MAX:
            raise RefusedPickle(f"a list of records of more than {DIRECTORY_BYTES_MAX} bytes")
        content = os.pread(self._handle, count, self._start + self._at)
        self._at += len(content)
        return content


def read_torch(files: tensors.SourceFiles, path: str) -> tuple[list[tensors.SourcePart], list[str]]:
    """Return the weights in the `torch.save` file `path`, and the names of what else it has.

    The file holds a state dict, or a dict with one under `model` or `state_dict`. Raises
    `CheckpointError` for a file of another kind, one that needs code to be opened, and one with
    values that are not dense tensors among its weights.
    """
    where = str(files.base / path)
    handle = files.open(path)
    try:
        value = open_torch(handle, 0, files.size(path), where)
    finally:
        os.close(handle)
    weights, left_out = pick_weights(value, where)
    return [part_of(name, one, path, where) for name, one in weights.items()], left_out


def open_torch(
    handle: int, start: int, size: int, where: str, *, others: tuple[str, ...] = ()
) -> Any:
    """Return the value in `size` bytes of an open file from `start`, with `Stored` as tensors.

    Names of classes that begin with one of `others` give an `Other`, and are never imported. Raises
    `CheckpointError` if it is no `torch.save` zip, or names any other class.
    """
    with _explained(where):
        with zipfile.ZipFile(_Window(handle, start, size)) as found:
            infos = found.infolist()
        records: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename.partition("/")[2]
            if name in records:
                raise RefusedPickle(f"the record {name!r} twice")
            records[name] = info
        if _PICKLE not in records:
            raise RefusedPickle(f"no record {_PICKLE!r}")
        place = partial(_place, handle, start, size)
        if (order := records.get(_BYTEORDER)) and os.pread(handle, 6, place(order)) == b"big":
            raise RefusedPickle("numbers of another byte order")
        pickled = records[_PICKLE]
        if pickled.file_size > PICKLE_BYTES_MAX:
            raise RefusedPickle(f"a pickle of {pickled.file_size} bytes")
        content = os.pread(handle, pickled.file_size, place(pickled))
        return read_pickle(
            iter((content,)),
            _finder(others),
            dict.fromkeys((Stored, Other, OrderedDict), _ignore),
            persistent=lambda reference: _storage(records, place, reference),
            text_max=max(len(content), 1),
        )


def pick_weights(value: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the state dict in a file's value, and what else is beside it.

    Raises `CheckpointError` if there is none.
    """
    if isinstance(value, dict):
        if value and all(isinstance(one, Stored) for one in value.values()):
            return value, []
        if found := _under(value):
            return found
        if any(isinstance(one, Stored) for one in value.values()):
            return value, []
        has = f"a dict with {', '.join(str(key)[:40] for key in list(value)[:8]) or 'no keys'}"
    else:
        has = f"a {type(value).__name__}"
    raise CheckpointError(
        f"{where}: it contains {has}; expected a state dict, or a dict with one under "
        f"{' or '.join(WEIGHTS)}. Save `model.state_dict()`"
    )


def _under(value: dict[Any, Any]) -> tuple[dict[str, Any], list[str]] | None:
    """Return the dict under a key of `WEIGHTS`, and what else there is, or None.

    If all nested tensors are below one other key, such as `app`, it may also be below that key.
    """
    if (key := _key_of_weights(value)) is not None:
        return value[key], [str(other) for other in value if other != key]
    tops = [top for top, one in value.items() if isinstance(one, dict) and _has_tensors(one)]
    if len(tops) != 1 or (key := _key_of_weights(value[tops[0]])) is None:
        return None
    others = [str(other) for other in value if other != tops[0]]
    return value[tops[0]][key], others + [
        f"{tops[0]}.{one}" for one in value[tops[0]] if one != key
    ]


def _key_of_weights(value: dict[Any, Any]) -> str | None:
    found = (key for key in WEIGHTS if isinstance(value.get(key), dict) and value[key])
    return next(found, None)


def _has_tensors(value: dict[Any, Any]) -> bool:
    """Return True if there is a tensor at any depth. A dict may contain itself."""
    seen: dict[int, dict[Any, Any]] = {}
    left = [value]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            if any(isinstance(item, Stored) for item in one.values()):
                return True
            left += [item for item in one.values() if isinstance(item, dict)]
    return False


def part_of(name: Any, value: Any, path: str, where: str) -> tensors.SourcePart:
    """Return the part of one entry of a state dict. Raises `CheckpointError` for other values."""
    if not isinstance(name, str):
        raise CheckpointError(f"{where}: the key {name!r} is not text; expected a parameter's name")
    if not isinstance(value, Stored):
        kind = "sparse or special tensor" if isinstance(value, Other) else type(value).__name__
        raise CheckpointError(
            f"{where}: {name}: it is a {kind}, expected a dense tensor; leave it out of the state "
            "dict and save that again"
        )
    shape = tensors.check_shape(name, value.sizes, value.dtype, where)
    strides = None if value.is_contiguous else value.strides
    if strides is not None and 0 in strides:
        raise CheckpointError(
            f"{where}: {name}: it is an expanded tensor; save it with .contiguous()"
        )
    return tensors.SourcePart.whole(
        name, value.dtype, shape, [tensors.ByteSegment(path, value.offset, value.extent)], strides
    )


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn any error of reading hostile bytes into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        # Malicious bytes can raise any exception. Each means that the file is not valid.
        text = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise CheckpointError(
            f"{where}: it is not opened: {text}; expected a complete file that torch.save wrote "
            "since torch 1.6, with tensors and plain values only. Copy it again, or open it in a "
            "program that you trust and save its state dict again"
        ) from error


def _place(handle: int, start: int, size: int, info: zipfile.ZipInfo) -> int:
    """Return the byte of the file at which the content of a zip's record begins."""
    at = start + info.header_offset
    header = os.pread(handle, _HEADER_BYTES, at)
    is_stored = info.compress_type == zipfile.ZIP_STORED
    if not is_stored or len(header) < _HEADER_BYTES or not header.startswith(_HEADER):
        raise RefusedPickle(f"the record {info.filename[:100]!r} is compressed or has no header")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = at + _HEADER_BYTES + names
    if begin + info.file_size > start + size:
        raise RefusedPickle(f"the record {info.filename[:100]!r} is cut short")
    return begin


def _storage(
    records: Mapping[str, zipfile.ZipInfo],
    place: Callable[[zipfile.ZipInfo], int],
    reference: Any,
) -> _Storage:
    """Return the storage of a `torch.save` persistent id, if all its bytes exist."""
    match reference:
        case ("storage", torch.dtype() as dtype, str() as key, str(), int() as count):
            record = records.get(f"data/{key}")
            if record is None or not 0 <= count * dtype.itemsize <= record.file_size:
                raise RefusedPickle(f"a storage of {count} elements without their bytes")
            return _Storage(dtype, count, place(record))
    raise RefusedPickle("a reference to something that is not a storage")


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Stored:
    """Return a strided tensor, which must fit in its storage."""
    numbers = [offset, *size, *stride]
    if not isinstance(storage, _Storage) or len(size) != len(stride):
        raise RefusedPickle("a tensor without a storage")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise RefusedPickle("a tensor with invalid sizes")
    # Types that have no storage class are in untyped storages.
    dtype = next((one for one in rest if isinstance(one, torch.dtype)), storage.dtype)
    begin = storage.offset + offset * dtype.itemsize
    made = Stored(dtype, tuple(size), tuple(stride), begin)
    room = storage.count * storage.dtype.itemsize
    if made.extent and offset * dtype.itemsize + made.extent > room:
        raise RefusedPickle(f"a tensor of {tuple(size)} in a storage of {room} bytes")
    return made


def _parameter(value: Any, *_: Any) -> Any:
    return value


def _ignore(made: Any, state: Any) -> None:
    """Ignore attributes, such as the versions of modules that a state dict has."""


def _other(name: str) -> Maker:
    return Maker(name, new=Other, call=lambda *_: Other())


def _finder(others: tuple[str, ...]) -> Callable[[str, str], Any]:
    find = finder(_makers())

    def find_or_ignore(module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return _other(full) if full.startswith(others) and others else find(module, name)

    return find_or_ignore


@cache
def _makers() -> dict[str, Any]:
    """Return torch's allowed names, with descriptions in place of tensors and storages."""
    makers = dict(plain_makers())
    for full, known in _get_allowed_globals().items():
        if isinstance(known, StorageType):
            makers[full] = known.dtype
        elif full.startswith("torch._utils._rebuild"):
            makers[full] = _other(full)
    calls: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
    }
    makers |= {full: Maker(full, call=call) for full, call in calls.items()}
    makers["torch.storage.UntypedStorage"] = torch.uint8
    return makers
