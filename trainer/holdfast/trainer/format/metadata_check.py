"""Checks that `.metadata` is plausible: types, bounds, and every element saved exactly once.

The unpickler only allows DCP's own classes, but an untrusted file may fill them with any values.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

_PRIME: Final = (1 << 61) - 1

Boxes = Sequence[tuple[Sequence[int], Sequence[int]]]
"""The offsets and sizes of each box, one number per dimension."""


def find_problem(metadata: dcp.Metadata) -> str | None:
    """Describe the first impossible value in `metadata`, or return None."""
    return next(_problems(metadata), None)


def tile(boxes: Boxes, whole: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Return True if the boxes together are `whole` and no two of them share an element.

    Each dimension gets a random function of the place. The boxes' integrals over the product of
    these functions add up to the integral of `whole` if the boxes tile it. If they do not, the sums
    are equal with a probability of 1 in 10^18.
    """
    # Empty boxes fill nothing, and may be anywhere.
    filled = [(offsets, sizes) for offsets, sizes in boxes if prod(sizes)]
    if len(filled) < 2:
        return [(tuple(o), tuple(s)) for o, s in filled] == (
            [(tuple(whole[0]), tuple(whole[1]))] if prod(whole[1]) else []
        )
    chances: list[dict[int, int]] = [{} for _ in whole[0]]

    def integral(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        value = 1
        for known, begin, size in zip(chances, offsets, sizes, strict=True):
            low = known.get(begin)
            if low is None:
                # Random and not fixed, so that a hostile file cannot choose boxes whose sums agree.
                low = known[begin] = secrets.randbelow(_PRIME)
            high = known.get(begin + size)
            if high is None:
                high = known[begin + size] = secrets.randbelow(_PRIME)
            value = value * (high - low) % _PRIME
        return value

    return sum(integral(*box) for box in filled) % _PRIME == integral(*whole)


def _problems(metadata: dcp.Metadata) -> Iterator[str]:
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict):
        yield f"its entries are a {type(entries).__name__}, expected a dict"
        return
    # A planner may keep any other data in it. Holdfast does not use it.
    if places is not None and not isinstance(places, Mapping):
        yield f"its places are a {type(places).__name__}, expected a dict"
        return
    for key, entry in entries.items():
        problem = _of_entry(key, entry)
        if problem:
            yield f"{key!r}: {problem}"
    for index, info in (places or {}).items():
        problem = _of_place(index, info)
        if problem:
            yield problem


def _of_entry(key: Any, entry: Any) -> str | None:
    if not isinstance(key, str):
        return f"a key of type {type(key).__name__}, expected str"
    if isinstance(entry, dcp.BytesStorageMetadata):
        return None
    if not isinstance(entry, dcp.TensorStorageMetadata):
        return f"an entry of type {type(entry).__name__}, expected a tensor's or a number's"
    properties = entry.properties
    if not isinstance(properties, dcp.TensorProperties) or not isinstance(
        properties.dtype, torch.dtype
    ):
        return "a tensor without a dtype"
    if not isinstance(entry.size, torch.Size) or not isinstance(entry.chunks, list):
        return "a tensor without a shape or a list of chunks"
    return next((p for c in entry.chunks if (p := _of_chunk(c, entry.size))), None)


def _of_chunk(chunk: Any, shape: torch.Size) -> str | None:
    if not isinstance(chunk, dcp.ChunkStorageMetadata):
        return f"a chunk of type {type(chunk).__name__}, expected ChunkStorageMetadata"
    offsets, sizes = chunk.offsets, chunk.sizes
    if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size):
        return "a chunk without offsets and sizes"
    fits = len(offsets) == len(sizes) == len(shape) and all(
        begin >= 0 and size >= 0 and begin + size <= whole
        for begin, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    if fits:
        return None
    return f"a chunk at {tuple(offsets)} of {tuple(sizes)} in a tensor of {tuple(shape)}"


def _of_place(index: Any, info: Any) -> str | None:
    if not isinstance(index, dcp.MetadataIndex) or not isinstance(index.fqn, str):
        return f"a place with an index of type {type(index).__name__}, expected MetadataIndex"
    if not isinstance(info, _StorageInfo):
        return f"{index.fqn!r}: a place of type {type(info).__name__}"
    path, offset, length = info.relative_path, info.offset, info.length
    if not isinstance(path, str) or not path or "\0" in path:
        return f"{index.fqn!r}: its path is {path!r}, expected the path of a file"
    if not isinstance(offset, int) or not isinstance(length, int) or offset < 0 or length < 1:
        return f"{index.fqn!r}: {length!r} bytes at {offset!r}, expected some within the file"
    return None
