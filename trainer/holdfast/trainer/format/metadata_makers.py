"""The objects that the names in a `.metadata` stand for: DCP's record classes and torch's types.

No name gives the class itself, so nothing in the pickle can set an attribute of a class.
"""

from __future__ import annotations

import posixpath
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix

from holdfast.trainer.format.plain_pickle import Build, Maker, RefusedPickle, is_cheap

DIMENSIONS_MAX: Final = 64
_INT64_MAX: Final = (1 << 63) - 1
_DCP: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
# The module of a tensor's properties in checkpoints before torch 2.3.
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS: Final = {
    _DCP: (
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp.TensorStorageMetadata,
    ),
    _FILES: (_StorageInfo, _StoragePrefix),
}
_OF_DCP: Final = "torch.distributed.checkpoint."
# Python 3.13 pickles paths under a module that no other Python has.
_OF_PATHS: Final = ("pathlib", "pathlib._local")
# The values of `TensorProperties` in every torch that has written checkpoints.
PROPERTIES: Final = 5
_FORMATS: Final = {
    dcp._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    dcp._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST: torch.channels_last,
    dcp._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}
_LAYOUTS: Final = {str(each): each for each in vars(torch).values() if type(each) is torch.layout}


class UnknownRecord:
    """Stands for an object of a class that a later DCP added, with none of its content.

    It is accepted where Holdfast reads nothing, for example in a field that is new as well.
    """

    __slots__ = ()


def find_maker(module: str, name: str) -> Any:
    """Return what a name in `.metadata` stands for. Raises `RefusedPickle` for unknown names."""
    known = _MAKERS.get((module, name))
    if known is not None:
        return known
    # Not by `getattr`, because that would make torch import more of its modules.
    if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
        return found
    # A later DCP may add record classes. An empty stand-in is enough where nothing reads them.
    if module.startswith(_OF_DCP):
        return _UNKNOWN
    raise RefusedPickle(f"it names {module}.{name}, which DCP never writes")


def make_size(extents: Any = ()) -> torch.Size:
    """Return a `torch.Size` of integers that are possible for a tensor."""
    if type(extents) not in {tuple, list, torch.Size} or len(extents) > DIMENSIONS_MAX:
        raise RefusedPickle(f"a size that is not a sequence of at most {DIMENSIONS_MAX} dimensions")
    # A negative or huge extent would pass for a size until torch allocates by it.
    for extent in extents:
        if type(extent) is not int or not 0 <= extent <= _INT64_MAX:
            raise RefusedPickle("a size with a dimension that is not an int64 of 0 or more")
    return torch.Size(extents)


def make_layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in _LAYOUTS:
        raise RefusedPickle("a layout that torch does not have")
    return _LAYOUTS[name]


def make_ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    """Return an empty `OrderedDict`. The pickle then sets its items."""
    if len(pairs):
        raise RefusedPickle("an OrderedDict from pairs, which Python 3 never pickles")
    return OrderedDict()


def _path(*parts: Any) -> str:
    """Return a path as a string. Stock DCP stores the directory it wrote to; it is not used."""
    if not all(type(part) is str for part in parts):
        raise RefusedPickle("a path with a part that is not text")
    return posixpath.join("", *parts)


def _member(kind: Any = None, name: Any = None) -> dcp._MEM_FORMAT_ENCODING:
    """Return a memory format by its name. Debian 12's Python 3.11.2 pickles enums by `getattr`."""
    members = dcp._MEM_FORMAT_ENCODING.__members__
    # The only call of `getattr` in a `.metadata`. Any other would reach attributes of classes.
    if type(kind) is not Maker or kind.call is not _format or type(name) is not str:
        raise RefusedPickle("a call of getattr that is not for a memory format")
    if name not in members:
        raise RefusedPickle("a memory format that torch does not have")
    return members[name]


def _format(number: Any = None) -> dcp._MEM_FORMAT_ENCODING:
    if type(number) is not int:
        raise RefusedPickle("a memory format that torch does not have")
    return dcp._MEM_FORMAT_ENCODING(number)


def _fill_properties(made: Any, state: Any) -> None:
    """Take the state tuple that `TensorProperties.__getstate__` returns."""
    if type(state) is not tuple or len(state) < PROPERTIES:
        raise RefusedPickle(
            f"tensor properties that are not a tuple of {PROPERTIES} values or more"
        )
    dtype, layout, requires_grad, memory_format, pin_memory = state[:PROPERTIES]
    is_sound = (
        type(dtype) is torch.dtype
        and type(layout) is torch.layout
        and type(requires_grad) is type(pin_memory) is bool
        and type(memory_format) is dcp._MEM_FORMAT_ENCODING
    )
    if not is_sound:
        raise RefusedPickle("tensor properties of wrong types")
    vars(made).update(
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        memory_format=_FORMATS[memory_format],
        pin_memory=pin_memory,
    )
    # A later torch adds its fields at the end, as 2.15 did with the strides of the saved tensor.
    # No load needs them, because an entry's bytes are always in the order of its shape.
    added = [each.name for each in fields(made)][PROPERTIES:]
    vars(made).update(
        (name, value)
        for name, value in zip(added, state[PROPERTIES:], strict=False)
        if is_cheap(value)
    )


def _fill_index(made: Any, state: Any) -> None:
    """Take an index's attributes, whose types must be cheap to hash."""
    if type(state) is not dict or type(state.get("fqn")) is not str:
        raise RefusedPickle("an index without a key")
    if type(state.get("offset")) not in {torch.Size, type(None)}:
        raise RefusedPickle("an index with an offset that is not a torch.Size")
    _fill(made, state)


def _fill(made: Any, state: Any) -> None:
    """Take a record's attributes. Unknown ones may be from a later DCP and are kept."""
    if type(state) is not dict:
        raise RefusedPickle(f"attributes of a {type(made).__name__} that are not a dict")
    if not state.keys() <= _FIELDS[type(made)]:
        for name in state:
            # Dunder names would change how the object behaves, such as `__class__`.
            if type(name) is not str or name.startswith("__"):
                raise RefusedPickle(f"a {type(made).__name__} must not have the attribute {name!r}")
    vars(made).update(state)


def _maker_of(kind: type) -> Maker:
    return Maker(kind.__name__, new=lambda: object.__new__(kind))


def _all_makers() -> dict[tuple[str, str], Maker]:
    makers = {
        (module, kind.__name__): _maker_of(kind)
        for module, kinds in _RECORDS.items()
        for kind in kinds
    }
    makers |= {
        (_DCP, "TensorProperties"): _maker_of(dcp.TensorProperties),
        (_SHARDED, "TensorProperties"): _maker_of(dcp.TensorProperties),
        (_DCP, "_MEM_FORMAT_ENCODING"): Maker("_MEM_FORMAT_ENCODING", call=_format),
        (_SHARDED, "MEM_FORMAT_ENCODING"): Maker("MEM_FORMAT_ENCODING", call=_format),
        ("torch", "Size"): Maker("Size", call=make_size),
        ("torch.serialization", "_get_layout"): Maker("_get_layout", call=make_layout),
        ("collections", "OrderedDict"): Maker("OrderedDict", call=make_ordered),
        # Protocol 2 has the module's name in Python 2.
        ("builtins", "getattr"): Maker("getattr", call=_member),
        ("__builtin__", "getattr"): Maker("getattr", call=_member),
    }
    makers |= {
        (module, name): Maker(name, call=_path)
        for module in _OF_PATHS
        for name in ("PosixPath", "PurePosixPath")
    }
    return makers


def _ignore(made: Any, state: Any) -> None:
    """Take nothing of the state."""


_UNKNOWN: Final = Maker("a later DCP's", new=UnknownRecord, call=lambda *_: UnknownRecord())
_MAKERS: Final = _all_makers()
_FIELDS: Final = {
    kind: frozenset(each.name for each in fields(kind))
    for kinds in _RECORDS.values()
    for kind in kinds
}
KEY_TYPES: Final = frozenset({dcp.MetadataIndex})
BUILDS: Final[Mapping[type, Build]] = {
    **dict.fromkeys(_FIELDS, _fill),
    dcp.MetadataIndex: _fill_index,
    dcp.TensorProperties: _fill_properties,
    UnknownRecord: _ignore,
}
