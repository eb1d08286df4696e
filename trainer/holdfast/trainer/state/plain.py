"""State dicts of schedulers, scalers and users' objects as JSON beside named tensors.

Nothing is pickled. Values that JSON cannot express are marked: a tensor by its name in the
checkpoint, a tuple, a mapping with keys that are not text, bytes, a NumPy number, and a float that
is not finite.

A tensor's name joins the keys of its path by dots. If two paths have the same joined name, the name
of each also contains a digest of its path. The name of a tensor then does not depend on the order
of the entries.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from holdfast.contracts.disk.digests import digest_of
from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.planning.rank_rows import problem_with_form
from holdfast.trainer.process import devices

MARK: Final = "$holdfast"
DEPTH_MAX: Final = 64
# Python writes longer integers in decimal only if its limit of digits is raised.
INT_BITS_MAX: Final = 14_000
# Mappings that a loaded state has again, because their owners use more than a dict has.
_MAPPINGS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "ordered": OrderedDict,
    "counter": Counter,
}
_FACTORIES: Final = (int, float, list, dict, set, str)
# NumPy's scalars and arrays whose types torch and JSON can express.
_NUMBERS: Final = "biuf"
_FLOAT_BYTES_MAX: Final = 8
_TEXTS: Final[Mapping[type, str]] = {np.str_: "str", np.bytes_: "bytes"}
# Other arrays, such as masked ones, have more than their values.
_ARRAYS: Final = (np.ndarray, np.memmap)
# In a path, before a key that contains a tensor itself.
_KEY: Final = "$key"

_Path = tuple[Any, ...]
Encoded = tuple[Any, Mapping[str, torch.Tensor]]
"""What `encode` returns."""


class _Found(NamedTuple):
    """A tensor in a state: its path, and its mark in the document, which contains its name."""

    path: _Path
    tensor: torch.Tensor
    marked: dict[str, Any]


def encode(value: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return `value` as JSON, and its tensors by name. Each name begins with `name`.

    Raises `CheckpointError` with the path of any value that is neither plain nor a tensor.
    """
    found: list[_Found] = []
    document = _encode(value, name, (), found, 0)
    times = Counter(one.marked["value"] for one in found)
    tensors: dict[str, torch.Tensor] = {}
    for one in found:
        joined = one.marked["value"]
        # Only names that occur twice get a digest, so that usual names stay readable and stable.
        if times[joined] > 1:
            one.marked["value"] = f"{joined}~{digest_of(repr(one.path).encode())}"
        if one.marked["value"] in tensors:
            raise CheckpointError(f"{joined}: two entries have this name; rename one of them")
        tensors[one.marked["value"]] = one.tensor
    return document, tensors


def decode(document: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `encode` was given. `tensors` has the names from `encode`."""
    if isinstance(document, list):
        return [decode(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    kind = document.get(MARK)
    if kind is None:
        return {key: decode(item, tensors) for key, item in document.items()}
    value = document["value"]
    if kind in {"tensor", "array"}:
        if not isinstance(value, str) or (tensor := tensors.get(value)) is None:
            raise CheckpointError(
                f"train_state.json names the tensor {ascii(value)[:100]}, which the checkpoint "
                "does not have; verify the checkpoint, and load another one if it is damaged"
            )
        if kind == "tensor":
            return tensor
        array = tensor.numpy()
        return array.astype(array.dtype.newbyteorder()) if document.get("swapped") else array
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in value)
    if kind == "size":
        return torch.Size(value)
    if kind == "mapping":
        pairs = {decode(key, tensors): decode(item, tensors) for key, item in value}
        return _as_mapping(document.get("as"), pairs)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "float":
        return float(value)
    if kind == "int":
        return int(value, 16)
    if kind == "number":
        return np.dtype(document["dtype"]).type(decode(value, tensors))
    raise CheckpointError(f"{kind!r}: this version of Holdfast does not know this kind of state")


def templates(document: Any, live: Encoded | None = None) -> dict[str, torch.Tensor]:
    """Return a new tensor to load into, by name, for every tensor that `document` names.

    `live` is the live object's state. If it has a tensor of the same shape and type at the same
    path, the new one has that tensor's device and sharding. Otherwise it is on the CPU. Live
    tensors are never loaded into: the program may share one with its model, or clear it first.
    """
    ours: dict[_Path, torch.Tensor] = {}
    if live is not None:
        ours = {path: live[1][one["value"]] for path, one in _named_tensors(live[0])}
    found: dict[str, torch.Tensor] = {}
    for path, one in _named_tensors(document):
        shape, dtype = list(one["shape"]), getattr(torch, one["dtype"].removeprefix("torch."))
        tensor = ours.get(path)
        if tensor is not None and list(tensor.shape) == shape and tensor.dtype == dtype:
            # Contiguous, because a load writes the bytes in the order of the shape.
            found[one["value"]] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        else:
            found[one["value"]] = torch.empty(shape, dtype=dtype, device=devices.CPU)
    return found


def to_bytes(value: Any, name: str) -> bytes:
    """Return `value` and its tensors as bytes: JSON, a line break, then each tensor's bytes.

    Raises `CheckpointError` as `encode` does, with paths that begin with `name`.
    """
    document, tensors = encode(value, name)
    for path, tensor in tensors.items():
        if problem := problem_with_form(tensor):
            raise CheckpointError(
                f"{path}: it is {problem}, and a checkpoint cannot store it exactly; expected a "
                "dense tensor with memory"
            )
    contents = [_content(tensor) for tensor in tensors.values()]
    sizes = dict(zip(tensors, map(len, contents), strict=True))
    head = json.dumps([document, sizes], allow_nan=False).encode()
    return b"\n".join((head, b"".join(contents)))


def from_bytes(content: bytes) -> Any:
    head, _, rest = content.partition(b"\n")
    document, sizes = json.loads(head)
    tensors = templates(document)
    at = 0
    for name, size in sizes.items():
        if size:
            # A copy of the bytes: `frombuffer` on them would give a tensor that cannot be written.
            piece = torch.frombuffer(bytearray(rest[at : at + size]), dtype=tensors[name].dtype)
            tensors[name].view(-1).copy_(piece)
        at += size
    return decode(document, tensors)


def _content(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return whole.view(torch.uint8).numpy().tobytes()


def _encode(value: Any, name: str, path: _Path, found: list[_Found], depth: int) -> Any:
    # A state that contains itself would recurse for ever.
    if depth > DEPTH_MAX:
        raise CheckpointError(f"{name}: nested more than {DEPTH_MAX} deep; does it contain itself?")
    if isinstance(value, np.generic):
        return _encode_scalar(value, name, path, found, depth)
    # Before `int`, because `bool` is an `int`.
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        is_long = int(value).bit_length() > INT_BITS_MAX
        return {MARK: "int", "value": hex(value)} if is_long else int(value)
    if isinstance(value, float):
        # JSON has neither NaN nor infinity.
        return float(value) if math.isfinite(value) else {MARK: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        return _note("tensor", value.detach(), name, path, found)
    if type(value) in _ARRAYS and value.dtype.kind in _NUMBERS:
        # torch does not have NumPy's long types.
        with contextlib.suppress(TypeError):
            native = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
            marked = _note("array", native, name, path, found)
            if not value.dtype.isnative:
                marked["swapped"] = True
            return marked
    if isinstance(value, bytes):
        return {MARK: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.Size):
        return {MARK: "size", "value": list(value)}
    # A named tuple has a class, which only a pickle could restore.
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        items = [
            _encode(item, f"{name}.{i}", (*path, i), found, depth + 1)
            for i, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {MARK: "tuple", "value": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, path, found, depth)
    raise _without_pickle(value, name)


def _encode_scalar(
    value: np.generic, name: str, path: _Path, found: list[_Found], depth: int
) -> dict[str, Any]:
    """Return a scalar of NumPy with its type: without it, a resume computes with other digits."""
    kind = _TEXTS.get(type(value))
    if value.dtype.kind in _NUMBERS and value.dtype.itemsize <= _FLOAT_BYTES_MAX:
        kind = value.dtype.name
    if kind is None:
        raise _without_pickle(value, name)
    item = _encode(value.item(), name, path, found, depth + 1)
    return {MARK: "number", "dtype": kind, "value": item}


def _without_pickle(value: object, name: str) -> CheckpointError:
    kind = type(value).__name__
    if isinstance(value, np.ndarray | np.generic):
        kind = f"{kind} of {value.dtype}"
    return CheckpointError(
        f"{name}: {kind} cannot be saved without a pickle; expected tensors, "
        "numbers, text, bytes, lists, tuples and mappings. Let its state_dict return those"
    )


def _note(
    kind: str, tensor: torch.Tensor, name: str, path: _Path, found: list[_Found]
) -> dict[str, Any]:
    marked = {MARK: kind, "value": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
    found.append(_Found(path, tensor, marked))
    return marked


def _encode_mapping(
    value: Mapping[Any, Any], name: str, path: _Path, found: list[_Found], depth: int
) -> Any:
    items = {
        key: _encode(item, f"{name}.{key}", (*path, key), found, depth + 1)
        for key, item in value.items()
    }
    kind = _kind_of(value)
    # A mapping that has the mark itself must not be taken for a marked value.
    if kind is None and all(type(key) is str for key in value) and MARK not in value:
        return items
    pairs = [
        [_encode(key, f"{name}.{key}", (*path, _KEY, key), found, depth + 1), item]
        for key, item in items.items()
    ]
    return {MARK: "mapping", "value": pairs} | ({"as": kind} if kind else {})


def _kind_of(value: Mapping[Any, Any]) -> str | None:
    """Return the name of a mapping's type, or None for those that become a dict."""
    if type(value) is defaultdict:
        factory = value.default_factory
        return f"default {factory.__name__}" if factory in _FACTORIES else None
    return next((name for name, kind in _MAPPINGS.items() if type(value) is kind), None)


def _as_mapping(kind: str | None, pairs: dict[Any, Any]) -> Any:
    if kind is None:
        return pairs
    for factory in _FACTORIES:
        if kind == f"default {factory.__name__}":
            return defaultdict(factory, pairs)
    made = _MAPPINGS.get(kind)
    if made is None:
        raise CheckpointError(f"{kind!r}: this version of Holdfast does not know this mapping")
    return made(pairs)


def _named_tensors(document: Any, path: _Path = ()) -> Iterator[tuple[_Path, dict[str, Any]]]:
    """Yield the path and the mark of each tensor that `document` names."""
    if isinstance(document, list):
        for number, item in enumerate(document):
            yield from _named_tensors(item, (*path, number))
        return
    if not isinstance(document, dict):
        return
    kind = document.get(MARK)
    if kind in {"tensor", "array"}:
        yield path, document
    elif kind == "tuple":
        yield from _named_tensors(document["value"], path)
    elif kind == "mapping":
        for key, item in document["value"]:
            # A key is part of a path only if it is plain.
            inner = json.dumps(key, sort_keys=True)
            yield from _named_tensors(key, (*path, _KEY, inner))
            yield from _named_tensors(item, (*path, inner))
    elif kind is None:
        for key, item in document.items():
            yield from _named_tensors(item, (*path, key))
