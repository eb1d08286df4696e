"""Reads the header of a safetensors file: a length of 8 bytes, JSON, and then all tensors' bytes.

The format is that of https://github.com/huggingface/safetensors. Its rules are checked here, since
the file may come from anywhere: no duplicate names, no gaps, no overlaps, exactly the bytes that
the shapes need.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.sources import tensors

# The limit of the safetensors library itself.
HEADER_BYTES_MAX: Final = 100_000_000
LENGTH_BYTES: Final = 8
TYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_FACTS: Final = frozenset({"dtype", "shape", "data_offsets"})
METADATA: Final = "__metadata__"


def read_safetensors(files: tensors.SourceFiles, path: str) -> list[tensors.SourcePart]:
    """Return the tensors of the safetensors file `path`, in the order of their bytes.

    Only the header is read. Raises `CheckpointError` if the file cannot be read, is cut short or
    breaks a rule of the format.
    """
    where = str(files.base / path)
    handle = files.open(path)
    try:
        size = files.size(path)
        length = int.from_bytes(os.pread(handle, LENGTH_BYTES, 0), "little")
        most = min(HEADER_BYTES_MAX, size - LENGTH_BYTES)
        if size < LENGTH_BYTES or length > most:
            raise CheckpointError(
                f"{where}: it begins with a header of {length} bytes, but the file has {size}; "
                f"expected a header of at most {HEADER_BYTES_MAX} bytes inside the file. The file "
                "is cut short, or is not safetensors file"
            )
        content = _read(handle, length)
    finally:
        os.close(handle)
    begin = LENGTH_BYTES + length
    return parse_header(content, path=path, data_at=begin, data_bytes=size - begin, where=where)


def parse_header(
    content: bytes, *, path: str, data_at: int, data_bytes: int, where: str
) -> list[tensors.SourcePart]:
    """Return the tensors of a header. `data_at` and `data_bytes` are where the bytes lie.

    Raises `CheckpointError` for anything that the format does not allow.
    """
    try:
        # The keys of one JSON object may repeat. A plain dict would keep only the last one.
        table = json.loads(content, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its header is not JSON: {_short(error)}") from error
    if not isinstance(table, dict):
        raise CheckpointError(
            f"{where}: its header is a {type(table).__name__}, expected an object"
        )
    places = [facts.get("data_offsets") for facts in table.values() if isinstance(facts, dict)]
    pairs = [place for place in places if isinstance(place, list) and len(place) == 2]
    tensors.check_empty(sum(begin == end for begin, end in pairs), where)
    entries = [
        _entry(name, facts, path=path, data_at=data_at, where=where)
        for name, facts in table.items()
        if name != METADATA
    ]
    entries.sort(key=lambda part: (part.segments[0].offset, part.segments[0].bytes))
    _check_places(entries, data_at, data_bytes, where)
    return entries


def _entry(name: str, facts: Any, *, path: str, data_at: int, where: str) -> tensors.SourcePart:
    if not isinstance(facts, dict) or facts.keys() != _FACTS:
        raise CheckpointError(
            f"{where}: {name}: expected the facts dtype, shape and data_offsets in the header"
        )
    dtype = TYPES.get(facts["dtype"]) if isinstance(facts["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{where}: {name}: its type is {str(facts['dtype'])[:40]}, expected one of "
            f"{', '.join(TYPES)}; convert it, or leave it out with --exclude before the export"
        )
    shape = tensors.check_shape(name, facts["shape"], dtype, where)
    offsets = facts["data_offsets"]
    is_pair = isinstance(offsets, list) and len(offsets) == 2
    if not is_pair or not all(type(at) is int and at >= 0 for at in offsets):
        raise CheckpointError(f"{where}: {name}: its data_offsets are not two numbers of 0 or more")
    begin, end = offsets
    wanted = prod(shape) * dtype.itemsize
    if end - begin != wanted:
        raise CheckpointError(
            f"{where}: {name}: its data_offsets hold {end - begin} bytes, but a tensor of "
            f"{facts['dtype']} and the shape {list(shape)} has {wanted}; write the file again"
        )
    return tensors.SourcePart.whole(
        name, dtype, shape, [tensors.ByteSegment(path, data_at + begin, wanted)]
    )


def _check_places(
    entries: Sequence[tensors.SourcePart], data_at: int, data_bytes: int, where: str
) -> None:
    """Raise `CheckpointError` unless the tensors follow each other and fill the file."""
    at = data_at
    for part in entries:
        (segment,) = part.segments
        if segment.offset != at:
            kind = "overlaps another tensor" if segment.offset < at else "begins after a gap"
            raise CheckpointError(
                f"{where}: {part.name} {kind}: byte {segment.offset - data_at} of the data, "
                f"expected {at - data_at}; write the file again"
            )
        at += segment.bytes
    if at != data_at + data_bytes:
        raise CheckpointError(
            f"{where}: it has {data_bytes} bytes of data, but its header describes {at - data_at}; "
            "the file is cut short or has bytes after its end. Copy it again"
        )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {names.most_common(1)[0][0][:100]!r} twice")
    return table


def _read(handle: int, length: int) -> bytes:
    content = b""
    while len(content) < length:
        piece = os.pread(handle, length - len(content), LENGTH_BYTES + len(content))
        if not piece:
            break
        content += piece
    return content


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text[:200]
