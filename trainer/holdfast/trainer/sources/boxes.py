"""A source of weights in the form that the checkpoint reader loads from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.format.metadata import Opened
from holdfast.trainer.format.saved_boxes import BoxTable, SavedBoxes
from holdfast.trainer.sources.tensors import MODEL, Part, Source

# A tensor in another order is read as runs of elements that follow each other in the file.
RUNS_MAX: Final = 1 << 20

# The offsets, the sizes, the file, and the first byte of a box.
_Box = tuple[tuple[int, ...], tuple[int, ...], str, int]


def opened_from(source: Source) -> Opened:
    """Return the parts of a source as an opened checkpoint with the keys `model.<name>`.

    Raises `CheckpointError` for a tensor whose elements are scattered over the file.
    """
    numbers: dict[str, int] = {}
    boxes: dict[str, list[_Box]] = defaultdict(list)
    first: dict[str, Part] = {}
    for part in source.parts:
        key = f"{MODEL}{part.name}"
        first.setdefault(key, part)
        boxes[key].extend(_boxes_of(part, source))
    by_key = {key: _table(found, first[key], numbers) for key, found in boxes.items()}
    metadata = Metadata(
        state_dict_metadata={
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=first[key].dtype),
                size=torch.Size(first[key].shape),
                # The reader takes the boxes from the table.
                chunks=list[ChunkStorageMetadata](),
            )
            for key in by_key
        },
        planner_data={},
        storage_data={},
    )
    extents = {path: state.bytes for path, state in source.files.items() if path in numbers}
    table = BoxTable(tuple(numbers), by_key, extents, is_raw=True)
    return Opened(source.base, None, metadata, table, is_lean=True)


def _table(found: Sequence[_Box], part: Part, numbers: dict[str, int]) -> SavedBoxes:
    """Return the boxes of one tensor as columns. New files get the next number."""
    dims, count = len(part.shape), len(found)
    offsets, sizes = (
        np.array([box[side] for box in found], np.int64).reshape(count, dims) for side in (0, 1)
    )
    files = [numbers.setdefault(path, len(numbers)) for _, _, path, _ in found]
    return SavedBoxes(
        offsets,
        sizes,
        np.array(files, np.int32),
        np.array([at for *_, at in found], np.int64),
        sizes.prod(axis=1) * part.dtype.itemsize,
    )


def _boxes_of(part: Part, source: Source) -> Iterator[_Box]:
    """Yield boxes whose elements are consecutive in the file, in row-major order."""
    (segment,) = part.segments
    if part.strides is None:
        yield part.offsets, part.sizes, segment.path, segment.offset
        return
    run = next((d for d, step in enumerate(part.strides) if step == 1 and part.sizes[d] > 1), None)
    counts = [1 if d == run else size for d, size in enumerate(part.sizes)]
    if prod(counts) > RUNS_MAX:
        raise CheckpointError(
            f"{source.place}: {part.name}: its elements are scattered over the file, in "
            f"{prod(counts)} runs; expected at most {RUNS_MAX}. Save it with .contiguous(), or "
            "import the file first, with `holdfast import`"
        )
    sizes = tuple(size if d == run else 1 for d, size in enumerate(part.sizes))
    for place in product(*map(range, counts)):
        at = sum(number * step for number, step in zip(place, part.strides, strict=True))
        offsets = tuple(a + b for a, b in zip(part.offsets, place, strict=True))
        yield offsets, sizes, segment.path, segment.offset + at * part.dtype.itemsize
