"""State dicts of schedulers, scalers and users' objects as JSON beside named tensors.

Nothing is pickled. Values that JSON cannot express are marked: a tensor by its name in the
checkpoint, a tuple, a mapping with keys that are not text, bytes, and a float that is not finite.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer import devices

MARK: Final = "$holdfast"
DEPTH_MAX: Final = 64


def encode(value: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return `value` as JSON, and its tensors by name. Each name begins with `name`.

    Raises `CheckpointError` with the path of any value that is neither plain nor a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(value, name, tensors, 0), tensors


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
        return tensor if kind == "tensor" else tensor.numpy()
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in value)
    if kind == "mapping":
        return {decode(key, tensors): decode(item, tensors) for key, item in value}
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "float":
        return float(value)
    raise CheckpointError(f"{kind!r}: this version of Holdfast does not know this kind of state")


def templates(document: Any, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a tensor to load into, by name, for every tensor that `document` names.

    A live tensor of the same shape is used as is, with its sharding and device. Otherwise the
    tensor is new and on the CPU.
    """
    found: dict[str, torch.Tensor] = {}
    for name, shape, dtype in _named_tensors(document):
        tensor = live.get(name)
        if tensor is None or list(tensor.shape) != shape or str(tensor.dtype) != dtype:
            kind = getattr(torch, dtype.removeprefix("torch."))
            tensor = torch.empty(shape, dtype=kind, device=devices.CPU)
        found[name] = tensor
    return found


def to_bytes(value: Any, name: str) -> bytes:
    """Return `value` and its tensors as bytes: JSON, a line break, then each tensor's bytes.

    Raises `CheckpointError` as `encode` does, with paths that begin with `name`.
    """
    document, tensors = encode(value, name)
    contents = [_content(tensor) for tensor in tensors.values()]
    sizes = dict(zip(tensors, map(len, contents), strict=True))
    head = json.dumps([document, sizes], allow_nan=False).encode()
    return b"\n".join((head, b"".join(contents)))


def from_bytes(content: bytes) -> Any:
    """Return the value that `to_bytes` was given."""
    head, _, rest = content.partition(b"\n")
    document, sizes = json.loads(head)
    tensors = templates(document, {})
    at = 0
    for name, size in sizes.items():
        if size:
            piece = torch.frombuffer(bytearray(rest[at : at + size]), dtype=tensors[name].dtype)
            tensors[name].view(-1).copy_(piece)
        at += size
    return decode(document, tensors)


def _content(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().cpu().contiguous().view(-1)
    return whole.view(torch.uint8).numpy().tobytes()


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise CheckpointError(f"{name}: nested more than {DEPTH_MAX} deep; does it contain itself?")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {MARK: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor("tensor", value.detach(), name, tensors)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _encode_tensor("array", torch.from_numpy(value.copy()), name, tensors)
    if isinstance(value, bytes):
        return {MARK: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{name}.{i}", tensors, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {MARK: "tuple", "value": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, tensors, depth)
    raise CheckpointError(
        f"{name}: {type(value).__name__} cannot be saved without a pickle; expected tensors, "
        "numbers, text, bytes, lists, tuples and mappings. Let its state_dict return those"
    )


def _encode_tensor(
    kind: str, tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    tensors[name] = tensor
    shape, dtype = list(tensor.shape), str(tensor.dtype)
    return {MARK: kind, "value": name, "shape": shape, "dtype": dtype}


def _encode_mapping(
    value: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor], depth: int
) -> Any:
    items = {key: _encode(item, f"{name}.{key}", tensors, depth + 1) for key, item in value.items()}
    if all(isinstance(key, str) for key in value) and MARK not in value:
        return items
    pairs = [[_encode(key, name, tensors, depth + 1), item] for key, item in items.items()]
    return {MARK: "mapping", "value": pairs}


def _named_tensors(document: Any) -> list[tuple[str, list[int], str]]:
    if isinstance(document, list):
        return [entry for item in document for entry in _named_tensors(item)]
    if not isinstance(document, dict):
        return []
    if document.get(MARK) in {"tensor", "array"}:
        return [(document["value"], document["shape"], document["dtype"])]
    return [entry for item in document.values() for entry in _named_tensors(item)]
