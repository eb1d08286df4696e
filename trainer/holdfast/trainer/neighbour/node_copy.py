"""A copy of what one node's ranks staged for a step, with the checksums of its files.

The owner copies the slots first and then computes the checksums from its copy, if the slots still
held the same step. So a copy never mixes two steps, although living ranks overwrite snapshots.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.disk.digests import FileChecksum, digest_of
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.node.rank_status import fence
from holdfast.trainer.slots.slot_table import SlotTable
from holdfast.trainer.slots.slots import Slot, SlotState

# How much one thread copies before another one may run.
PIECE_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True)
class CopyBlock:
    """A part of a file that has its own checksum: `bytes` bytes from `at` of a rank's data."""

    rank: int
    path: str
    start: int
    at: int
    bytes: int
    digest: str


class NodeCopy:
    """A node's part of one step. `tables` and `entries` are in the order of its ranks."""

    def __init__(
        self,
        launch: int,
        tables: Sequence[SlotTable],
        entries: Sequence[Sequence[FileEntry]] = (),
    ) -> None:
        """Allocate memory for the data. Raises `OSError` or `MemoryError` if there is none."""
        self.launch, self.tables = launch, tuple(tables)
        self.entries = tuple(tuple(each) for each in entries)
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        sizes = [max(extent_of(table), mmap.PAGESIZE) for table in tables]
        self._maps = [mmap.mmap(-1, size, flags=kind) for size in sizes]
        self.data = [memoryview(each) for each in self._maps]

    @property
    def step(self) -> int:
        return self.tables[0].step

    @property
    def node(self) -> int:
        """The number of the node whose ranks staged the step."""
        return self.tables[0].node

    @property
    def bytes(self) -> int:
        return sum(extent_of(table) for table in self.tables)

    def record(self) -> dict[str, Any]:
        """Return what the owner says about the step, as JSON: its tables and checksums."""
        return {
            "launch": self.launch,
            "tables": [table.to_document() for table in self.tables],
            "entries": [[e.model_dump(mode="json") for e in each] for each in self.entries],
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> NodeCopy:
        """Return an empty copy for a record. Raises `ValueError` if the record is not valid."""
        tables = [SlotTable.parse(table) for table in record["tables"]]
        entries = [[FileEntry(**entry) for entry in each] for each in record["entries"]]
        problem = _problem_with(tables, entries)
        if problem:
            raise ValueError(f"not the record of a snapshot: {problem}")
        return cls(int(record["launch"]), tables, entries)

    def seal(self) -> None:
        """Compute the checksums of all files from this copy's bytes."""
        self.entries = tuple(
            tuple(
                FileEntry.of(f.path, f.bytes, _checksum(self.content(index, f.offset, f.bytes)))
                for f in table.files
            )
            for index, table in enumerate(self.tables)
        )

    def content(self, index: int, at: int, size: int) -> memoryview:
        """Return `size` bytes of the data of the `index`-th rank."""
        return self.data[index][at : at + size]

    def blocks(self) -> Iterator[CopyBlock]:
        """Yield every part that has its own checksum, in order. Call it after `seal`."""
        for index, (table, entries) in enumerate(zip(self.tables, self.entries, strict=True)):
            for file, entry in zip(table.files, entries, strict=True):
                for start, size, digest in entry.spans():
                    yield CopyBlock(index, file.path, start, file.offset + start, size, digest)

    def has(self, block: CopyBlock) -> bool:
        """Return True if the copy has the bytes of the block, by their checksum."""
        return digest_of(self.content(block.rank, block.at, block.bytes)) == block.digest

    def damage(self) -> list[str]:
        """Return the paths of the files with a block that differs from its checksum."""
        return list(dict.fromkeys(block.path for block in self.blocks() if not self.has(block)))

    def close(self) -> None:
        """Free the memory."""
        for view in self.data:
            view.release()
        for each in self._maps:
            # A view that another thread still reads frees the memory when it ends.
            with contextlib.suppress(BufferError):
                each.close()


def extent_of(table: SlotTable) -> int:
    """Return how many bytes of a slot's data its files take, with gaps between them."""
    return max((file.offset + file.bytes for file in table.files), default=0)


def copy_slots(launch: int, slots: Sequence[Slot]) -> NodeCopy | None:
    """Return a copy of a snapshot that all local ranks hold, or None if a rank overwrote it.

    Raises `OSError` or `MemoryError` if there is no memory for it.
    """
    marks = [slot.mark for slot in slots]
    if any(state is not SlotState.SNAPSHOT for state, _, _ in marks):
        return None
    try:
        tables = sorted((SlotTable.parse(slot.table) for slot in slots), key=lambda t: t.rank)
    except ValueError:
        # Read while it was written.
        return None
    by_rank = {SlotTable.parse(slot.table).rank: slot for slot in slots}
    if _is_torn(slots, marks) or not _is_of_one_step(tables):
        return None
    copied = NodeCopy(launch, tables)
    for table, target in zip(tables, copied.data, strict=True):
        source, end = by_rank[table.rank].data, extent_of(table)
        for at in range(0, end, PIECE_BYTES):
            stop = min(at + PIECE_BYTES, end)
            target[at:stop] = source[at:stop]
    if _is_torn(slots, marks):
        copied.close()
        return None
    copied.seal()
    return copied


def _is_torn(slots: Sequence[Slot], marks: Sequence[tuple[SlotState, int, bytes]]) -> bool:
    """Return True if a slot has changed since its mark was read."""
    # All bytes that were read so far were read before the marks are.
    fence()
    return [slot.mark for slot in slots] != list(marks)


def _is_of_one_step(tables: Sequence[SlotTable]) -> bool:
    first = tables[0]
    places = {(t.step, t.checkpoint, t.node, t.target, t.error) for t in tables}
    is_whole = {t.local_rank for t in tables} == set(range(first.local_ranks))
    return is_whole and places == {(first.step, first.checkpoint, first.node, "", "")}


def _problem_with(tables: Sequence[SlotTable], entries: Sequence[Sequence[FileEntry]]) -> str:
    """Return why a record is not one of a whole snapshot, or ''."""
    if not tables or len(tables) != len(entries) or not _is_of_one_step(tables):
        return "the tables are not those of all ranks of a node"
    for table, each in zip(tables, entries, strict=True):
        listed = [(file.path, file.bytes) for file in table.files]
        if listed != [(entry.path, entry.bytes) for entry in each]:
            return f"the checksums of rank {table.rank} are not those of its files"
        if any(file.offset < 0 or file.bytes < 0 for file in table.files):
            return f"a file of rank {table.rank} has no place"
    return ""


def _checksum(content: memoryview) -> FileChecksum:
    checksum = FileChecksum(len(content))
    for at in range(0, len(content), PIECE_BYTES):
        checksum.update(content[at : at + PIECE_BYTES])
    return checksum
