"""Builds the bytes of `.metadata` from a plan's columns instead of from objects.

`torch.distributed.checkpoint` reads a pickle of its `Metadata`: one object for every box, and two
more for where the box lies. With ten million boxes, building and pickling these objects takes
minutes. Here every box is a fixed record of opcodes with its numbers filled in, some thousands of
records at a time. Key names and file names are put into the pickle's memo first. Any unpickler
reads the same result. The length is known before any of it is built, so its memory can be reserved
before. A thread then writes it in place and holds the interpreter lock only for short moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

from holdfast.trainer.format import opcodes as op
from holdfast.trainer.format.columns import Int32s, Int64s, Item, end_to_end
from holdfast.trainer.planning.global_plan import GlobalPlan, align, group

# Locates each written box. Walks the plan's rows in `.metadata` order, one window at a time.
#
# This runs in the background after planning, because only `.metadata` needs the offsets of all
# ranks.

# Rows that are handled together. Their columns fit into a core's cache.
WINDOW_ROWS: Final = 8192


@dataclass(frozen=True)
class Window:
    """Consecutive rows by key and place, as columns.

    `nth` counts the boxes of one item. `offset` and `length` are bytes in the writer's file.
    `form` numbers the forms of all shard tables.
    """

    key: Int32s
    nth: Int64s
    place: Int64s
    form: Int32s
    writer: Int32s
    offset: Int64s
    length: Int64s


@dataclass(frozen=True)
class RowPlaces:
    """All written rows. `order` lists them by key and place; each item's begin at `first`.

    The other columns are by row, except `form_bytes`, which is by form.
    """

    order: Int64s
    first: Int64s
    key: Int32s
    place: Int64s
    form: Int32s
    writer: Int32s
    offset: Int64s
    form_bytes: Int64s

    def windows(self) -> Iterator[Window]:
        """Yield all rows in order, `WINDOW_ROWS` at a time."""
        for begin in range(0, len(self.order), WINDOW_ROWS):
            row = self.order[begin : begin + WINDOW_ROWS]
            key, form = self.key[row], self.form[row]
            yield Window(
                key=key,
                nth=np.arange(begin, begin + len(row)) - self.first[key],
                place=self.place[row],
                form=form,
                writer=self.writer[row],
                offset=self.offset[row],
                length=self.form_bytes[form],
            )


def count_rows(plan: GlobalPlan) -> Int64s:
    counts = np.zeros(len(plan.items), dtype=np.int64)
    for key, writer in zip(plan.keys, plan.writers, strict=True):
        np.add.at(counts, key, np.count_nonzero(writer >= 0, axis=0))
    return counts


def find_places(plan: GlobalPlan) -> RowPlaces:
    """Sort the written rows and compute their offsets."""
    lines = [len(shard_table.digests) for shard_table in plan.shard_tables]
    forms = np.cumsum(
        [0, *(len(shard_table.pattern.form_bytes) for shard_table in plan.shard_tables)]
    )
    form = [
        np.tile(shard_table.pattern.form + np.int32(base), count)
        for shard_table, count, base in zip(plan.shard_tables, lines, forms.tolist(), strict=False)
    ]
    key = [np.tile(columns, count) for columns, count in zip(plan.keys, lines, strict=True)]
    keys = end_to_end(key, np.int32)
    place = end_to_end([shard_table.place.ravel() for shard_table in plan.shard_tables], np.int64)
    writer = end_to_end([writer.ravel() for writer in plan.writers], np.int32)
    written = np.flatnonzero(writer >= 0)
    counts = count_rows(plan)
    return RowPlaces(
        order=written[group(keys[written], place[written], plan.items).order],
        first=np.cumsum(counts) - counts,
        key=keys,
        place=place,
        form=end_to_end(form, np.int32),
        writer=writer,
        offset=end_to_end([offset.ravel() for offset in _offsets(plan)], np.int64),
        form_bytes=end_to_end(
            [shard_table.pattern.form_bytes for shard_table in plan.shard_tables], np.int64
        ),
    )


def stack_sizes(parts: list[Int64s]) -> Int64s:
    """Stack tables of sizes vertically. Narrow ones are padded with 1."""
    dims = max((part.shape[1] for part in parts), default=0)
    stacked = np.ones((sum(len(part) for part in parts), dims), dtype=np.int64)
    at = 0
    for part in parts:
        stacked[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return stacked


def _offsets(plan: GlobalPlan) -> list[Int64s]:
    """Return by shard table where each written row begins in its writer's file."""
    offsets = [
        np.zeros(shard_table.place.shape, dtype=np.int64) for shard_table in plan.shard_tables
    ]
    lengths = [
        shard_table.pattern.form_bytes[shard_table.pattern.form]
        for shard_table in plan.shard_tables
    ]
    for blocks, kept in zip(plan.held, plan.kept, strict=True):
        base = 0
        for number, line in blocks:
            rows = kept[plan.shard_tables[number].pattern.kind]
            its_lengths = align(lengths[number][rows])
            ends = base + np.cumsum(its_lengths)
            offsets[number][line, rows] = ends - its_lengths
            base = int(ends[-1]) if len(rows) else base
    return offsets


Piece = bytes | op.Octets


class MetadataPickle:
    """The pickle of DCP's `Metadata` for a plan, not built yet. `bytes` is its length."""

    def __init__(self, plan: GlobalPlan, file_name: Callable[[int], str]) -> None:
        """`file_name` returns the file of a writer."""
        self._plan, items = plan, plan.items
        memo = op.Memo(op.CLASSES, op.ATTRIBUTES)
        used = np.flatnonzero(plan.file_bytes).tolist()
        files = {rank: memo.put(op.text(file_name(rank))) for rank in used}
        keys = [memo.put(op.text(item.key)) for item in items]
        self._file_numbers, self._key_numbers = _lookup(files), np.array(keys, dtype=np.int64)
        kinds = [op.NUMBER if item.dtype is None else len(item.shape) for item in items]
        self._kinds = np.array(kinds, dtype=np.int64)
        self._records = {kind: _records(plan, memo, kind) for kind in sorted(set(kinds))}
        self._entries = [_entry(memo, key, i) for key, i in zip(keys, items, strict=True)]
        head: list[bytes] = [*memo.new("Metadata"), op.MARK]
        head += [op.text("state_dict_metadata"), op.EMPTY_DICT]
        self._head = b"".join([op.PROTO, *memo.pieces, *head])
        paths = [p for key, i in zip(keys, items, strict=True) for p in _path(key, i)]
        middle = [
            op.text("planner_data"),
            op.EMPTY_DICT,
            *paths,
            op.text("storage_data"),
            op.EMPTY_DICT,
        ]
        self._middle = b"".join(middle)
        tail = [op.text("storage_meta"), op.NONE, op.text("version"), op.text(CURRENT_DCP_VERSION)]
        self._tail = b"".join([*tail, op.SETITEMS, op.BUILD, op.STOP])
        fixed = [self._head, self._middle, self._tail, *(p for pair in self._entries for p in pair)]
        counts = zip(kinds, count_rows(plan).tolist(), strict=True)
        # The length is certain before anything is built: the slots of the ranks are planned by it.
        self.bytes = sum(map(len, fixed)) + sum(n * self._records[kind].bytes for kind, n in counts)

    def write_to(self, memory: memoryview, is_over: Callable[[], bool] = lambda: False) -> None:
        """Write the pickle into `memory`, which has `bytes` bytes. Stops once `is_over()`."""
        target, at = np.frombuffer(memory, dtype=np.uint8), 0
        for piece in self._pieces(find_places(self._plan)):
            source = np.frombuffer(piece, dtype=np.uint8) if isinstance(piece, bytes) else piece
            target[at : at + source.size] = source.reshape(-1)
            at += source.size
            # A session that closes must not wait for gigabytes of `.metadata`, see decision 8.
            if is_over():
                return
        # Readers find the parts of the image by the planned length, so a difference would damage
        # it.
        if at != self.bytes:
            raise RuntimeError(f"`.metadata` has {at} bytes, but {self.bytes} were planned")

    def _pieces(self, places: RowPlaces) -> Iterator[Piece]:
        yield self._head
        yield from self._pieces_of_entries(places)
        yield self._middle
        for window in places.windows():
            files, keys = self._file_numbers[window.writer], self._key_numbers[window.key]
            for kind, rows in self._split(window):
                yield self._records[kind].places(window, rows, keys, files)
        yield self._tail

    def _split(self, window: Window) -> Iterator[tuple[int, Int64s]]:
        """Yield the window's rows, grouped by the number of dimensions of their tensors."""
        kinds = self._kinds[window.key]
        for kind in np.unique(kinds).tolist():
            yield kind, np.flatnonzero(kinds == kind)

    def _pieces_of_entries(self, places: RowPlaces) -> Iterator[Piece]:
        """Yield each key of `state_dict_metadata`: its head, its chunks, its end."""
        entries, current = self._entries, -1
        for window in places.windows():
            chunks = {
                kind: self._records[kind].chunks(window, rows) for kind, rows in self._split(window)
            }
            used = dict.fromkeys(chunks, 0)
            keys = window.key
            bounds = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
            for begin, end in pairwise(bounds):
                number, kind = int(keys[begin]), int(self._kinds[keys[begin]])
                while current < number:
                    yield from self._between(current)
                    current += 1
                yield chunks[kind][used[kind] : used[kind] + end - begin]
                used[kind] += end - begin
        while current < len(entries):
            yield from self._between(current)
            current += 1

    def _between(self, number: int) -> Iterator[bytes]:
        """Yield the end of an entry and the head of the next one."""
        if number >= 0:
            yield self._entries[number][1]
        if number + 1 < len(self._entries):
            yield self._entries[number + 1][0]


@dataclass(frozen=True)
class _Records:
    """The opcodes of the boxes of all tensors with the same number of dimensions.

    `shapes` (by item) and `form_sizes` (by form) have a column for each dimension.
    """

    shapes: Int64s
    form_sizes: Int64s
    chunk: op.RecordTemplate
    place: op.RecordTemplate
    is_number: bool

    @property
    def bytes(self) -> int:
        """The bytes of one box, chunk and place together."""
        return self.chunk.record_bytes + self.place.record_bytes

    def chunks(self, window: Window, rows: Int64s) -> op.Octets:
        """Return the entries of the list `chunks`: offsets and sizes of these window rows."""
        if self.is_number:
            return np.zeros((len(rows), 0), dtype=np.uint8)
        form = window.form[rows]
        columns = [*self._offsets(window, rows), *self.form_sizes[form].T]
        return self.chunk.records(len(rows), columns)

    def places(self, window: Window, rows: Int64s, keys: Int64s, files: Int64s) -> op.Octets:
        """Return the entries of `storage_data`. `keys` and `files` are by the window's rows."""
        box = [] if self.is_number else [window.nth[rows], *self._offsets(window, rows)]
        where = [files[rows], window.offset[rows], window.length[rows]]
        return self.place.records(len(rows), [keys[rows], *box, *where])

    def _offsets(self, window: Window, rows: Int64s) -> list[Int64s]:
        key, rest, offsets = window.key[rows], window.place[rows], []
        for dim in reversed(range(1, self.shapes.shape[1])):
            rest, offset = np.divmod(rest, self.shapes[key, dim])
            offsets.append(offset)
        if self.shapes.shape[1]:
            offsets.append(rest)
        return offsets[::-1]


def _records(plan: GlobalPlan, memo: op.Memo, kind: int) -> _Records:
    """Return the templates for tensors of `kind` dimensions, or for numbers."""
    dims = max(kind, 0)
    shapes = np.ones((len(plan.items), dims), dtype=np.int64)
    for number, item in enumerate(plan.items):
        if item.dtype is not None and len(item.shape) == dims:
            shapes[number] = np.maximum(item.shape, 1)
    largest = shapes.max(axis=0, initial=1).tolist()
    chunk, place = op.RecordTemplate(), op.RecordTemplate()
    if kind != op.NUMBER:
        op.add_chunk(chunk, memo, largest)
    nth = sum(writer.size for writer in plan.writers)
    entry = max((int(s.pattern.form_bytes.max(initial=0)) for s in plan.shard_tables), default=0)
    file = int(plan.file_bytes.max(initial=0))
    op.add_place(place, memo, None if kind == op.NUMBER else largest, nth, file, entry)
    form_sizes = stack_sizes([shard_table.pattern.form_sizes for shard_table in plan.shard_tables])[
        :, :dims
    ]
    return _Records(shapes, form_sizes, chunk, place, kind == op.NUMBER)


def _entry(memo: op.Memo, key: int, item: Item) -> tuple[bytes, bytes]:
    """Return one key of `state_dict_metadata`: the bytes before its chunks and those after."""
    if item.dtype is None:
        return op.fetch(key) + op.number_entry(memo), b""
    before, between, after = op.tensor_entry(memo)
    size = b"".join(op.LONG + extent.to_bytes(8, "little") for extent in item.shape)
    head = [op.fetch(key), before, item.dtype.encode(), between, size, after]
    return b"".join(head), op.SETITEMS + op.BUILD + op.SETITEM


def _path(key: int, item: Item) -> list[bytes]:
    """Return one key of `planner_data`: the path by which the state is nested again."""
    parts = [
        op.text(p) if isinstance(p, str) else op.INT + p.to_bytes(4, "little") for p in item.path
    ]
    return [op.fetch(key), op.MARK, *parts, op.TUPLE, op.SETITEM]


def _lookup(numbers: dict[int, int]) -> Int64s:
    """Return the same mapping as an array, to map whole columns."""
    table = np.zeros(max(numbers, default=-1) + 1, dtype=np.int64)
    for number, value in numbers.items():
        table[number] = value
    return table
