"""Opening an entry that `torch.save` made, when a stranger may have made it: no code, no bombs.

The zip's records are looked at one by one: its pickle by a reader that makes nothing out of what
it does not know, its storages by their sizes. What passes is packed again, so that `torch.load`
is given just what was looked at.
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
from holdfast.trainer.planning.metadata import shorten_error
from holdfast.trainer.planning.metadata_makers import make_layout, make_ordered, make_size
from holdfast.trainer.planning.plain_pickle import (
    Maker,
    RefusedPickle,
    is_cheap,
    read_pickle,
)

RECORDS_MAX: Final = 10_000
_HEADER_BYTES: Final = 30
_HEADER: Final = b"PK\x03\x04"
_PICKLE: Final = "data.pkl"
# Beside the pickle and the storages, what `torch.load` asks for.
_KEPT: Final = ("byteorder", "version", ".format_version", ".storage_alignment")


@dataclass(frozen=True)
class _Storage:
    """A storage's record: elements of `item_bytes` each, `count` of them."""

    item_bytes: int
    count: int


class _Opaque:
    """A tensor or the like, whose making was looked at and left to torch."""


def load_plain(content: bytes) -> Any:
    """The value in `content`: a tensor, number or plain collection, on the CPU.

    Raises `DamagedCheckpointError` as `repack` does, and when torch cannot make the value.
    """
    packed = repack(content)
    try:
        return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    except Exception as error:
        raise _refusal(error) from error


def repack(content: bytes) -> bytes:
    """The zip of `torch.save` in `content`, packed again from the records that were looked at.

    Raises `DamagedCheckpointError` when it is no such zip, when it holds anything with code, or
    when its value would take more memory than its bytes.
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
        # Hostile bytes can raise anything at all; whatever it was, it is no value of ours.
        raise _refusal(error) from error


def _refusal(error: Exception) -> DamagedCheckpointError:
    words = shorten_error(error).splitlines()[0]
    return DamagedCheckpointError(
        f"an entry cannot be opened as a plain value: {words}; load another checkpoint",
        damaged=[f"an entry: {words}"],
    )


def _records_of(content: bytes) -> dict[str, memoryview]:
    """The records by their names without the archive's own; none is compressed."""
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        infos = found.infolist()
    if len(infos) > RECORDS_MAX:
        raise RefusedPickle(f"{len(infos)} records, expected {RECORDS_MAX} or less")
    records: dict[str, memoryview] = {}
    with memoryview(content) as whole:
        for info in infos:
            name = info.filename.partition("/")[2]
            is_needed = name == _PICKLE or name in _KEPT or name.startswith("data/")
            if name in records:
                raise RefusedPickle(f"the record {name!r} twice")
            if is_needed:
                records[name] = _record(whole, info)
    if _PICKLE not in records:
        raise RefusedPickle(f"no record {_PICKLE!r}")
    return records


def _record(content: memoryview, info: zipfile.ZipInfo) -> memoryview:
    """The bytes of a record, as they lie in the zip."""
    at = info.header_offset
    header = bytes(content[at : at + _HEADER_BYTES])
    if info.compress_type != zipfile.ZIP_STORED or not header.startswith(_HEADER):
        raise RefusedPickle(f"the record {info.filename!r} is compressed or has no header")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = at + _HEADER_BYTES + names
    record = content[begin : begin + info.file_size]
    if len(record) != info.file_size:
        raise RefusedPickle(f"the record {info.filename!r} is cut short")
    return record


def _check(records: Mapping[str, memoryview]) -> None:
    """Read the pickle without making its tensors; raises for what is not to be opened."""
    pickled = bytes(records[_PICKLE])
    users = [kind for kind in _allowed_by_user().values() if isinstance(kind, type)]
    read_pickle(
        iter((pickled,)),
        _find,
        dict.fromkeys((_Opaque, OrderedDict, *users), _ignore),
        persistent=partial(_storage, records),
        text_max=len(pickled),
    )


def _ignore(made: Any, state: Any) -> None:
    """Attributes of a tensor or an `OrderedDict` are left to torch, which sets them as such."""


def _storage(records: Mapping[str, memoryview], reference: Any) -> _Storage:
    """What a persistent id of `torch.save` refers to, if there are so many bytes of it."""
    match reference:
        case ("storage", int() as item_bytes, str() as key, str(), int() as count):
            record = records.get(f"data/{key}")
            if record is None or not 0 <= count * item_bytes <= len(record):
                raise RefusedPickle(f"a storage of {count} elements without their bytes")
            return _Storage(item_bytes, count)
    raise RefusedPickle("a reference to what is no storage")


def _find(module: str, name: str) -> Any:
    """What a name stands for: one that `torch.load` itself lets pass, else refused."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    full = f"{module}.{name}"
    if (maker := _makers().get(full)) is not None:
        return maker
    if full in _allowed_by_user():
        return _opaque(full)
    raise RefusedPickle(f"it names {full}, which a plain value does not need")


def _allowed_by_user() -> dict[str, Any]:
    """What the program itself has put among `torch.serialization`'s safe globals, by full name."""
    return dict(_get_user_allowed_globals())  # type: ignore[no-untyped-call]


def _opaque(name: str) -> Maker:
    """What makes something that is left to torch, of whatever it is given."""
    return Maker(name, new=_Opaque, call=lambda *_: _Opaque())


@cache
def _makers() -> dict[str, Any]:
    """By full name, all that torch allows and that takes no memory by a number in the pickle."""
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
        "torch.serialization._get_layout": make_layout,
        "torch.Size": make_size,
        "torch.device": _device,
        "collections.OrderedDict": make_ordered,
        "collections.Counter": _counter,
        "builtins.set": _set,
        "builtins.bytearray": _bytearray,
        "builtins.complex": complex,
        "_codecs.encode": _encode,
    }
    makers |= {full: Maker(full, call=call) for full, call in calls.items()}
    # Names that are types of tensors, and of storages without a type of their elements.
    makers["torch.storage.UntypedStorage"] = 1
    for full in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        makers[full] = Maker(full)
    return makers


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Opaque:
    """A strided tensor, which must lie within its storage: else torch would make that longer."""
    numbers = [offset, *size, *stride]
    if not isinstance(storage, _Storage) or len(size) != len(stride):
        raise RefusedPickle("a tensor without a storage")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise RefusedPickle("a tensor of odd sizes")
    item_bytes = next((one.itemsize for one in rest if isinstance(one, torch.dtype)), None)
    ends = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = storage.count * storage.item_bytes // (item_bytes or storage.item_bytes)
    if math.prod(size) and ends > room:
        raise RefusedPickle(f"a tensor of {tuple(size)} in a storage of {room} elements")
    return _Opaque()


def _from_type(make: Any, kind: Any, arguments: Any, state: Any = None) -> Any:
    """A tensor of a type of its own, made by another function of these."""
    if type(make) is not Maker or make.call is None or type(arguments) is not tuple:
        raise RefusedPickle("a tensor made of what makes none")
    return make.call(*arguments)


def _device(kind: Any, index: Any = 0) -> _Opaque:
    if type(kind) is not str or type(index) is not int:
        raise RefusedPickle("a device that is none")
    return _Opaque()


def _counter(counts: Any = None) -> Counter[Any]:
    if type(counts) not in {dict, type(None)}:
        raise RefusedPickle("a Counter of what are no counts")
    return Counter(counts)


def _set(items: Any = ()) -> frozenset[Any]:
    if type(items) not in {list, tuple} or not all(map(is_cheap, items)):
        raise RefusedPickle("a set of what are no scalars")
    return frozenset(items)


def _bytearray(content: Any = b"", encoding: Any = "latin-1") -> bytearray:
    """Never of a number, which would be so many zeros."""
    if type(content) is bytes:
        return bytearray(content)
    return bytearray(_encode(content, encoding))


def _encode(content: Any, encoding: Any) -> bytes:
    """Only as pickles of bytes do it: other codecs can make much of little."""
    if type(content) is not str or encoding not in ("latin1", "latin-1"):
        raise RefusedPickle("bytes by a codec that no pickle needs")
    return content.encode("latin-1")
