"""Plans the DCP files of an import: which bytes lie where, and the `.metadata` that says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.trainer.format.metadata_dump import dump_metadata
from holdfast.trainer.planning.global_plan import offsets_of
from holdfast.trainer.planning.layout import Template, make_template
from holdfast.trainer.sources.tensors import MODEL, Part, in_file_order

# Several files are written at the same time. A file far above this has long blocks, of which a
# rank that needs a part would read more than it needs.
FILE_BYTES_MAX: Final = 4 << 30
FILE_BYTES_MIN: Final = 64 << 20
FILES_WANTED: Final = 4
FILE_NAME: Final = "__0_{number}.distcp"


@dataclass(frozen=True)
class Entry:
    """One part in a file: its zip begins at `start` and has the form of `template`."""

    part: Part
    start: int
    template: Template


@dataclass(frozen=True)
class Image:
    """One file to write: its name, its entries in order, and its length in bytes."""

    name: str
    entries: tuple[Entry, ...]
    length: int

    def pieces(self) -> Iterator[tuple[int, bytes | Part]]:
        """Yield (position, content) in order: headers and footers as bytes, and the tensors."""
        for entry in self.entries:
            data_at, is_open = entry.template.data_at, True
            for at, piece in entry.template.pieces:
                if is_open and at >= data_at:
                    yield entry.start + data_at, entry.part
                    is_open = False
                yield entry.start + at, piece
            if is_open:
                # A tensor without elements has no bytes between its header and footer.
                yield entry.start + entry.template.length, entry.part


def plan_images(parts: Sequence[Part]) -> list[Image]:
    """Return the files for these parts. A part is never split."""
    total = sum(part.bytes for part in parts)
    wanted = min(FILE_BYTES_MAX, max(FILE_BYTES_MIN, total // FILES_WANTED))
    groups: list[list[Part]] = [[]]
    size = 0
    for part in in_file_order(parts):
        if groups[-1] and size + part.bytes > wanted:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.bytes
    return [_image(FILE_NAME.format(number=n), group) for n, group in enumerate(groups)]


def encode_metadata(images: Sequence[Image]) -> bytes:
    """Return `.metadata`, DCP's pickle, for the parts under the keys `model.<name>`."""
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    first: dict[str, Part] = {}
    storage = {}
    for image in images:
        for entry in image.entries:
            part, key = entry.part, f"{MODEL}{entry.part.name}"
            first.setdefault(key, part)
            index = MetadataIndex(key, part.offsets, len(chunks[key]))
            chunks[key].append(
                ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
            )
            storage[index] = _StorageInfo(image.name, entry.start, entry.template.length)
    return dump_metadata(
        Metadata(
            state_dict_metadata={
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=first[key].dtype),
                    size=torch.Size(first[key].shape),
                    chunks=found,
                )
                for key, found in chunks.items()
            },
            planner_data={key: tuple(key.split(".", 1)) for key in chunks},
            storage_data=storage,
            version=CURRENT_DCP_VERSION,
        )
    )


def _image(name: str, parts: Sequence[Part]) -> Image:
    templates: dict[tuple[tuple[int, ...], torch.dtype], Template] = {}
    for part in parts:
        form = part.sizes, part.dtype
        if form not in templates:
            templates[form] = make_template(torch.Size(part.sizes), part.dtype)
    found = [templates[part.sizes, part.dtype] for part in parts]
    lengths = np.array([template.length for template in found], dtype=np.int64)
    starts = offsets_of(lengths).tolist()
    entries = [Entry(*one) for one in zip(parts, starts, found, strict=True)]
    return Image(name, tuple(entries), starts[-1] + found[-1].length)
