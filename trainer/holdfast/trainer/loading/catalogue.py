"""The files of a checkpoint as numbered units, and what is wanted of each unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.trainer.loading.plan import PIECE_BYTES, CopySeries, Counts, FileUnits, Unit, cut
from holdfast.trainer.loading.targets import MemoryTarget, Wants

Placed = list[tuple[CopySeries, MemoryTarget]]


class Catalogue:
    """All files of a checkpoint cut into numbered units, the same on every rank."""

    def __init__(self, extents: Mapping[str, int], manifest: Manifest | None) -> None:
        """`extents` has the last byte of each file in `.metadata`. A manifest has its size."""
        entries = {entry.path: entry for entry in manifest.files} if manifest else {}
        self.files: dict[str, FileUnits] = {}
        self.whole: list[FileEntry] = []
        self.count = 0
        for path in sorted(extents):
            entry = entries.get(path)
            made = _units_of(path, extents[path], entry, self.count)
            if entry is not None and made.digests is None:
                self.whole.append(entry)
            self.files[path] = made
            self.count += made.count
        self._firsts = [file.first for file in self.files.values()]
        self._in_order = list(self.files.values())
        self.entries = entries

    def unit(self, number: int) -> Unit:
        return self._in_order[bisect_right(self._firsts, number) - 1].unit(number)

    def span(self, path: str) -> slice:
        file = self.files[path]
        return slice(file.first, file.first + file.count)

    def sizes(self) -> Counts:
        sizes = np.empty(self.count, dtype=np.int64)
        for file in self.files.values():
            starts = np.arange(file.count) * file.unit_bytes
            sizes[self.span(file.path)] = np.minimum(file.unit_bytes, file.size - starts)
        return sizes


def sort_by_unit(wants: Wants, catalogue: Catalogue) -> dict[int, Placed]:
    """Return the wanted parts of each unit, by its number."""
    by_unit: dict[int, Placed] = {}
    for want in wants.items:
        for number, parts in cut(want.series, catalogue.files[want.path]):
            by_unit.setdefault(number, []).extend((part, want.target) for part in parts)
    return by_unit


def _units_of(path: str, extent: int, entry: FileEntry | None, first: int) -> FileUnits:
    """Return how a file is read: by its entry's blocks, or by pieces if there are none."""
    if entry is None:
        return FileUnits(path, extent, first, PIECE_BYTES, None)
    if not entry.blocks and entry.bytes > PIECE_BYTES:
        return FileUnits(path, entry.bytes, first, PIECE_BYTES, None)
    digests = tuple(digest for _, _, digest in entry.spans())
    return FileUnits(path, entry.bytes, first, entry.block_bytes or PIECE_BYTES, digests)
