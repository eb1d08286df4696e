"""The saved boxes of a checkpoint as columns: where each part of each tensor lies in which file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from holdfast.trainer.format.columns import Int32s, Int64s

# Finds DTensors with strides that DCP's boxes cannot describe.


def find_odd_stride(value: DTensor) -> str | None:
    """Return why this rank's part of `value` is not a box, None if it is one.

    A `_StridedShard` is the outer half of a split that further mesh dimensions complete, as with
    FSDP over tensor parallelism. Without the inner half, a rank's rows are not contiguous, and
    DCP's box for them covers other rows. Stock DCP then loads wrong rows without an error.
    """
    mesh, placements = value.device_mesh, value.placements
    for dimension, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        inner = 1
        for further in range(dimension + 1, mesh.ndim):
            other = placements[further]
            if isinstance(other, Shard | _StridedShard) and other.dim == placement.dim:
                inner *= mesh.size(further)
        # Refused, because DCP's box for such a part covers other rows than the rank has.
        if inner != placement.split_factor:
            return (
                f"a DTensor with placements {placements} on a mesh of {tuple(mesh.shape)}: "
                f"{placement} expects {placement.split_factor} parts of dimension "
                f"{placement.dim} on further mesh dimensions, but there are {inner}. Redistribute "
                "it to Shard or Replicate first"
            )
    return None


# The file of a box that `.metadata` names no place for.
NO_FILE: Final = -1


@dataclass(frozen=True)
class SavedBoxes:
    """The boxes of one key, one per row; a number has one box of no dimensions.

    `file` numbers the files of the table. `offset` and `length` are the bytes of the box's entry.
    """

    offsets: Int64s
    sizes: Int64s
    file: Int32s
    offset: Int64s
    length: Int64s


@dataclass(frozen=True)
class BoxTable:
    """All saved boxes, by key, and the names of the files that they lie in.

    `extents` is how many bytes of each file `.metadata` uses, including those of keys that do not
    exist; -1 if a place has a negative number. With `is_raw`, a place has only the elements of a
    box, as in files of other formats, and not an entry of DCP around them.
    """

    files: tuple[str, ...]
    by_key: Mapping[str, SavedBoxes]
    extents: Mapping[str, int]
    is_raw: bool = False

    @classmethod
    def of(cls, metadata: Metadata) -> BoxTable:
        """Return the boxes of DCP's own objects. Raises `OverflowError` for impossible numbers."""
        storage = metadata.storage_data or {}
        numbers: dict[str, int] = {}
        by_key = {}
        for key, entry in metadata.state_dict_metadata.items():
            chunks: list[tuple[Sequence[int], Sequence[int]]] = [((), ())]
            dims = 0
            indices = [MetadataIndex(key)]
            if isinstance(entry, TensorStorageMetadata):
                chunks, dims = [(c.offsets, c.sizes) for c in entry.chunks], len(entry.size)
                # DCP's planner looks a part up by its offsets, so this lookup must do so too.
                indices = [MetadataIndex(key, offsets) for offsets, _ in chunks]
            found = [storage.get(index) for index in indices]
            places = [
                (numbers.setdefault(info.relative_path, len(numbers)), info.offset, info.length)
                if info is not None
                else (NO_FILE, 0, 0)
                for info in found
            ]
            file, offset, length = np.array(places, dtype=np.int64).reshape(-1, 3).T
            offsets, sizes = (
                np.array([one[side] for one in chunks], np.int64).reshape(len(chunks), dims)
                for side in (0, 1)
            )
            by_key[key] = SavedBoxes(offsets, sizes, file.astype(np.int32), offset, length)
        extents: dict[str, int] = {}
        for info in storage.values():
            is_sound = info.offset >= 0 and info.length >= 0
            end, before = info.offset + info.length, extents.get(info.relative_path, 0)
            # -1 stays: a place with a negative number remains invalid, whatever the others are.
            extents[info.relative_path] = max(before, end) if is_sound and before >= 0 else -1
        return cls(tuple(numbers), by_key, extents)

    def renamed(self, names: Mapping[str, str]) -> BoxTable:
        """Return the boxes of the keys in `names`, under their new names."""
        by_key = {names[key]: boxes for key, boxes in self.by_key.items() if key in names}
        return BoxTable(self.files, by_key, self.extents, self.is_raw)
