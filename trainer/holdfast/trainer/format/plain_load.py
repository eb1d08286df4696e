"""Safe opening of an entry written by `torch.save`, which may come from an untrusted source.

Each record of the zip is checked: the pickle by a reader that creates no unknown objects, the
storages by their sizes. The accepted records are packed again, so that `torch.load` gets only what
was checked.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch._utils import IMPORT_MAPPING, NAME_MAPPING
from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals
from torch.serialization import StorageType

from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.trainer.format import metadata_makers
from holdfast.trainer.format.metadata import shorten_error
from holdfast.trainer.format.plain_pickle import Find, Maker, RefusedPickle, is_cheap, read_pickle

RECORDS_MAX: Final = 10_000
_HEADER_BYTES: Final = 30
_HEADER: Final = b"PK\x03\x04"
_PICKLE: Final = "data.pkl"
# The other records that `torch.load` reads, besides the pickle and the storages.
_KEPT: Final = ("byteorder", "version", ".format_version", ".storage_alignment")


@dataclass(frozen=True)
class _Storage:
    """A storage's record: `count` elements of `item_bytes` each."""

    item_bytes: int
    count: int


class _Opaque:
    """A tensor or similar object, whose construction was checked and is left to torch."""


def load_plain(content: bytes) -> Any:
    """Return the value in `content`: a tensor, number or plain collection, on the CPU.

    Raises `DamagedCheckpointError` as `repack` does, and if torch cannot construct the value.
    """
    # torch must not see the original bytes: two zip readers can find different records in one file,
    # see decision 28.
    packed = repack(content)
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except Exception as error:
        raise _refusal(error) from error


def repack(content: bytes) -> bytes:
    """Return the `torch.save` zip in `content`, packed again from its checked records.

    Raises `DamagedCheckpointError` if it is not such a zip, if it contains code, or if its value
    would take more memory than its bytes.
    """
    try:
        records = _records_of(content)
        _check(records)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as made:
            for name, record in records.items():
                made.writestr(f"archive/{name}", record)
        return packed.getvalue()
    except Exception as error:
        # Malicious bytes can raise any exception. Each means that the entry is not valid.
        raise _refusal(error) from error


def _refusal(error: Exception) -> DamagedCheckpointError:
    text = shorten_error(error).splitlines()[0]
    return DamagedCheckpointError(
        f"an entry cannot be opened as a plain value: {text}; load another checkpoint",
        damaged=[f"an entry: {text}"],
    )


def _records_of(content: bytes) -> dict[str, memoryview]:
    """Return the records by name, without the archive's name. Compressed records are refused."""
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        infos = found.infolist()
    if len(infos) > RECORDS_MAX:
        raise RefusedPickle(f"{len(infos)} records, expected {RECORDS_MAX} or less")
    records: dict[str, memoryview] = {}
    with memoryview(content) as whole:
        for info in infos:
            name = info.filename.partition("/")[2]
            is_needed = name == _PICKLE or name in _KEPT or name.startswith("data/")
            # Two records of one name are the simplest way to show two readers different contents.
            if name in records:
                raise RefusedPickle(f"the record {name!r} twice")
            if is_needed:
                records[name] = _record(whole, info)
    if _PICKLE not in records:
        raise RefusedPickle(f"no record {_PICKLE!r}")
    return records


def _record(content: memoryview, info: zipfile.ZipInfo) -> memoryview:
    """Return the bytes of a record in the zip."""
    at = info.header_offset
    header = bytes(content[at : at + _HEADER_BYTES])
    # A compressed record can expand to any size.
    if info.compress_type != zipfile.ZIP_STORED or not header.startswith(_HEADER):
        raise RefusedPickle(f"the record {info.filename!r} is compressed or has no header")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = at + _HEADER_BYTES + names
    record = content[begin : begin + info.file_size]
    if len(record) != info.file_size:
        raise RefusedPickle(f"the record {info.filename!r} is cut short")
    return record


def _check(records: Mapping[str, memoryview]) -> None:
    """Read the pickle without constructing its tensors. Raises if it must not be opened."""
    pickled = bytes(records[_PICKLE])
    users = [kind for kind in _allowed_by_user().values() if isinstance(kind, type)]
    read_pickle(
        iter((pickled,)),
        finder(plain_makers()),
        dict.fromkeys((_Opaque, OrderedDict, *users), _ignore),
        persistent=partial(_storage, records),
        text_max=len(pickled),
    )


def _ignore(made: Any, state: Any) -> None:
    """Ignore attributes of a tensor or an `OrderedDict`. torch sets them later."""


def _storage(records: Mapping[str, memoryview], reference: Any) -> _Storage:
    """Return the storage of a `torch.save` persistent id, if all its bytes exist."""
    match reference:
        case ("storage", int() as item_bytes, str() as key, str(), int() as count):
            record = records.get(f"data/{key}")
            # torch would allocate the storage by this number.
            if record is None or not 0 <= count * item_bytes <= len(record):
                raise RefusedPickle(f"a storage of {count} elements without their bytes")
            return _Storage(item_bytes, count)
    raise RefusedPickle("a reference to something that is not a storage")


def finder(makers: Mapping[str, Any]) -> Find:
    """Return the function that finds the maker of a name for `read_pickle`, or refuses it.

    `makers` has the names that `torch.load` allows, as `plain_makers` returns them.
    """

    def find(module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        if (maker := makers.get(full)) is not None:
            return maker
        if full in _allowed_by_user():
            return _opaque(full)
        raise RefusedPickle(f"it names {full}, which a plain value does not need")

    return find


def _allowed_by_user() -> dict[str, Any]:
    """Return the program's own additions to `torch.serialization`'s safe globals, by full name."""
    return dict(_get_user_allowed_globals())  # type: ignore[no-untyped-call]


def _opaque(name: str) -> Maker:
    """Return a maker of an object that is left to torch, whatever its arguments."""
    return Maker(name, new=_Opaque, call=lambda *_: _Opaque())


@cache
def plain_makers() -> dict[str, Any]:
    """Return torch's allowed names, without those whose memory use a number in the pickle sets."""
    makers: dict[str, Any] = {}
    for full, known in _get_allowed_globals().items():
        if isinstance(known, torch.dtype | torch.qscheme):
            makers[full] = known
        elif isinstance(known, StorageType):
            makers[full] = known.dtype.itemsize
        elif full.startswith("torch._utils._rebuild"):
            makers[full] = _opaque(full)
    calls: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._utils._rebuild_qtensor": _tensor,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        "torch.serialization._get_layout": metadata_makers.make_layout,
        "torch.Size": metadata_makers.make_size,
        "torch.device": _device,
        "collections.OrderedDict": metadata_makers.make_ordered,
        "collections.Counter": _counter,
        "builtins.set": _set,
        "builtins.bytearray": _bytearray,
        "builtins.complex": complex,
        "_codecs.encode": _encode,
    }
    makers |= {full: Maker(full, call=call) for full, call in calls.items()}
    # Bytes in memory. Creating one runs no code, and `_check` ignores its state.
    makers["_io.BytesIO"] = Maker("_io.BytesIO", new=_Opaque)
    # Names that stand for tensor types, and for storages without an element type.
    makers["torch.storage.UntypedStorage"] = 1
    for full in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        makers[full] = Maker(full)
    return makers


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Opaque:
    """Check a strided tensor: it must fit in its storage, or torch would enlarge the storage."""
    numbers = [offset, *size, *stride]
    if not isinstance(storage, _Storage) or len(size) != len(stride):
        raise RefusedPickle("a tensor without a storage")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise RefusedPickle("a tensor with invalid sizes")
    item_bytes = next((one.itemsize for one in rest if isinstance(one, torch.dtype)), None)
    ends = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = storage.count * storage.item_bytes // (item_bytes or storage.item_bytes)
    # torch enlarges a storage that is too small, up to any size that the file names.
    if math.prod(size) and ends > room:
        raise RefusedPickle(f"a tensor of {tuple(size)} in a storage of {room} elements")
    return _Opaque()


def _from_type(make: Any, kind: Any, arguments: Any, state: Any = None) -> Any:
    """Check a tensor subclass, which another of these functions constructs."""
    if type(make) is not Maker or make.call is None or type(arguments) is not tuple:
        raise RefusedPickle("a tensor subclass from a function that makes no tensor")
    return make.call(*arguments)


def _device(kind: Any, index: Any = 0) -> _Opaque:
    if type(kind) is not str or type(index) is not int:
        raise RefusedPickle("an invalid device")
    return _Opaque()


def _counter(counts: Any = None) -> Counter[Any]:
    if type(counts) not in {dict, type(None)}:
        raise RefusedPickle("a Counter of values that are not counts")
    return Counter(counts)


def _set(items: Any = ()) -> frozenset[Any]:
    if type(items) not in {list, tuple} or not all(map(is_cheap, items)):
        raise RefusedPickle("a set of values that are not scalars")
    return frozenset(items)


def _bytearray(content: Any = b"", encoding: Any = "latin-1") -> bytearray:
    """Create a bytearray from content, and never from a number, which would allocate zeros."""
    # `bytearray(6 << 30)` passes torch's `weights_only=True`, see decision 28.
    if type(content) is bytes:
        return bytearray(content)
    return bytearray(_encode(content, encoding))


def _encode(content: Any, encoding: Any) -> bytes:
    """Encode only as pickles of bytes do. Other codecs can expand a small input."""
    if type(content) is not str or encoding not in ("latin1", "latin-1"):
        raise RefusedPickle("bytes with a codec that no pickle needs")
    return content.encode("latin-1")
