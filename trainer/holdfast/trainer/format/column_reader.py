"""Reads the `.metadata` that Holdfast wrote into columns, without an object for each box.

`metadata_pickle` writes each box as a record of fixed opcodes with its numbers filled in. This
reader accepts exactly that form: every byte that is not a number or a name is compared with what
Holdfast writes there. It interprets no opcode, so it can neither run code nor import a name. For
any other `.metadata`, it raises `OtherForm`, and `plain_pickle` reads the file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

from holdfast.trainer.format import opcodes as op
from holdfast.trainer.format.columns import Int32s, Int64s, end_to_end
from holdfast.trainer.format.plain_pickle import TEXT_BYTES_MAX
from holdfast.trainer.format.saved_boxes import BoxTable, SavedBoxes

_WINDOW: Final = 16 * TEXT_BYTES_MAX
_MARGIN: Final = 2 * TEXT_BYTES_MAX
_NUMBER_MAX: Final = 1 << 62
_TEXT, _FETCH = b"X", b"j"


class OtherForm(ValueError):
    """The pickle is not of the form that Holdfast writes. It may still be a valid one."""


def read_columns(chunks: Iterator[bytes]) -> tuple[dcp.Metadata, BoxTable]:
    """Return the keys of a `.metadata`, without chunks and places, and its boxes.

    Raises `OtherForm` if Holdfast did not write it, or if a value in it is impossible.
    """
    return _Reader(chunks).read()


class _Reader:
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._data, self._at, self._is_last = b"", 0, False
        self._memo = op.Memo(op.CLASSES, op.ATTRIBUTES)
        self._names: list[str] = []
        self._base = len(op.CLASSES) + len(op.ATTRIBUTES)
        self._metadata = dcp.Metadata({}, planner_data={}, storage_data={})
        # Compiled from the opcodes that Holdfast writes, so reader and writer cannot differ.
        before, between, after = map(re.escape, op.tensor_entry(self._memo))
        key, dtype, shape = b"j(.{4})", rb"([a-z0-9_]{1,40})", b"((?:\x8a\x08.{8}){0,64})"
        pattern = key + before + dtype + between + shape + after
        self._tensor = re.compile(pattern, re.DOTALL)
        self._number = re.compile(key + re.escape(op.number_entry(self._memo)), re.DOTALL)
        self._templates: dict[tuple[bool, int], op.RecordTemplate] = {}
        # By number of dimensions: the offsets and sizes of all boxes, in order of keys.
        self._offsets: dict[int, list[Int64s]] = {}
        self._sizes: dict[int, list[Int64s]] = {}
        self._keys: list[str] = []
        self._dims: list[int] = []
        self._counts: list[int] = []

    def read(self) -> tuple[dcp.Metadata, BoxTable]:
        self._expect(op.PROTO + b"".join(self._memo.pieces))
        while self._peek(1) == _TEXT:
            self._names.append(self._text())
            self._expect(op.MEMOIZE + op.POP)
        head = [*self._memo.new("Metadata"), op.MARK, op.text("state_dict_metadata"), op.EMPTY_DICT]
        self._expect(b"".join(head))
        while self._peek(1) == _FETCH:
            self._entry()
        self._expect(op.text("planner_data") + op.EMPTY_DICT)
        while self._peek(1) == _FETCH:
            self._path()
        self._expect(op.text("storage_data") + op.EMPTY_DICT)
        table = self._places()
        end = [op.text("storage_meta"), op.NONE, op.text("version"), op.text(CURRENT_DCP_VERSION)]
        self._expect(b"".join([*end, op.SETITEMS, op.BUILD]))
        if self._peek(1) == op.STOP:
            self._expect(op.STOP)
        else:
            self._storage_meta()
        if self._peek(1):
            raise OtherForm("bytes after the end")
        return self._metadata, table

    # --- bytes ----------------------------------------------------------------------------

    def _fill(self) -> None:
        """Move the window forward if it is short of a text's length."""
        if self._is_last or len(self._data) - self._at >= _MARGIN:
            return
        pieces, size = [self._data[self._at :]], len(self._data) - self._at
        while size < _WINDOW and not self._is_last:
            piece = next(self._chunks, b"")
            self._is_last = not piece
            pieces.append(piece)
            size += len(piece)
        self._data, self._at = b"".join(pieces), 0

    def _peek(self, count: int) -> bytes:
        self._fill()
        return self._data[self._at : self._at + count]

    def _take(self, count: int) -> bytes:
        found = self._peek(count)
        if len(found) < count:
            raise OtherForm("it ends early")
        self._at += count
        return found

    def _expect(self, content: bytes) -> None:
        if self._take(len(content)) != content:
            raise OtherForm("other opcodes")

    def _text(self) -> str:
        self._expect(_TEXT)
        count = int.from_bytes(self._take(4), "little")
        if count > TEXT_BYTES_MAX:
            raise OtherForm("a long text")
        try:
            return self._take(count).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise OtherForm("a text that is not UTF-8") from error

    def _name(self, number: int) -> str:
        if not 0 <= number - self._base < len(self._names):
            raise OtherForm("a name that is not there")
        return self._names[number - self._base]

    def _storage_meta(self) -> None:
        self._expect(op.BEFORE)
        self._text()
        self._expect(op.BETWEEN)
        self._text()
        self._expect(op.AFTER)

    # --- keys -----------------------------------------------------------------------------

    def _entry(self) -> None:
        self._fill()
        if found := self._number.match(self._data, self._at):
            self._at = found.end()
            self._add(found[1], dcp.BytesStorageMetadata(), op.NUMBER, 1)
            return
        found = self._tensor.match(self._data, self._at)
        if not found:
            raise OtherForm("another kind of entry")
        self._at = found.end()
        octets = np.frombuffer(found[3], np.uint8).reshape(-1, len(op.LONG) + 8)[:, len(op.LONG) :]
        shape = np.ascontiguousarray(octets).view("<i8").ravel()
        dtype = vars(torch).get(found[2].decode())
        if not isinstance(dtype, torch.dtype) or np.any(shape < 0):
            raise OtherForm("a tensor of another kind")
        count = self._chunks_of(shape)
        self._expect(op.SETITEMS + op.BUILD + op.SETITEM)
        properties = dcp.TensorProperties(dtype=dtype)
        entry = dcp.TensorStorageMetadata(properties, torch.Size(shape.tolist()), [])
        self._add(found[1], entry, len(shape), count)

    def _add(
        self,
        number: bytes,
        entry: dcp.BytesStorageMetadata | dcp.TensorStorageMetadata,
        dims: int,
        n: int,
    ) -> None:
        key = self._name(int.from_bytes(number, "little"))
        if key in self._metadata.state_dict_metadata:
            raise OtherForm("a key twice")
        self._metadata.state_dict_metadata[key] = entry
        self._keys.append(key)
        self._dims.append(dims)
        self._counts.append(n)

    def _chunks_of(self, shape: Int64s) -> int:
        """Read the chunks of a tensor, and return how many there are."""
        dims, count = len(shape), 0
        while self._peek(1) == _FETCH:
            columns = self._records(dims, is_chunk=True)
            if not dims:
                columns = [np.zeros((len(columns[0]), 0), np.int64)] * 2
            offsets, sizes = (
                (np.stack(columns[:dims], 1), np.stack(columns[dims:], 1))
                if dims
                else (columns[0], columns[1])
            )
            # A hostile chunk would otherwise be read outside its tensor's file entry.
            if (offsets < 0).any() or (sizes < 0).any() or (sizes > shape - offsets).any():
                raise OtherForm("a chunk outside its tensor")
            self._offsets.setdefault(dims, []).append(offsets)
            self._sizes.setdefault(dims, []).append(sizes)
            count += len(offsets)
        return count

    def _path(self) -> None:
        self._expect(_FETCH)
        key, parts = self._name(int.from_bytes(self._take(4), "little")), list[str | int]()
        self._expect(op.MARK)
        while (code := self._peek(1)) != op.TUPLE:
            if code == op.INT:
                self._at += 1
                parts.append(int.from_bytes(self._take(4), "little", signed=True))
            else:
                parts.append(self._text())
        self._expect(op.TUPLE + op.SETITEM)
        self._metadata.planner_data[key] = tuple(parts)

    # --- boxes ----------------------------------------------------------------------------

    def _records(self, dims: int, *, is_chunk: bool) -> list[Int64s]:
        """Read records of one form, and return their numbers. Raises `OtherForm` if there is none.

        A tensor without dimensions has one chunk of no numbers.
        """
        known = self._templates.get((is_chunk, dims))
        template: op.RecordTemplate = known or self._fitted(dims, is_chunk=is_chunk)
        columns, count = template.read(self._data, self._at)
        if known and not count:
            # Its numbers may be wider than those of the boxes before.
            template = self._fitted(dims, is_chunk=is_chunk)
            columns, count = template.read(self._data, self._at)
        if not count:
            raise OtherForm("another kind of box")
        self._templates[is_chunk, dims] = template
        self._at += count * template.record_bytes
        return columns if columns else [np.zeros(count, np.int64)]

    def _fitted(self, dims: int, *, is_chunk: bool) -> op.RecordTemplate:
        """Return the form of a box, with the widths of the numbers that come next."""
        template, largest = op.FittedTemplate(self._data, self._at), [0] * max(dims, 0)
        if is_chunk:
            op.add_chunk(template, self._memo, largest)
        else:
            op.add_place(template, self._memo, None if dims == op.NUMBER else largest, 0, 0, 0)
        return template

    def _places(self) -> BoxTable:
        counts, dims = np.array(self._counts, np.int64), np.array(self._dims, np.int64)
        first, total = np.cumsum(counts) - counts, int(counts.sum())
        offsets = {kind: end_to_end(found, np.int64) for kind, found in self._offsets.items()}
        self._offsets.clear()
        number_of = {key: number for number, key in enumerate(self._keys)}
        item_of = np.array([number_of.get(name, -1) for name in self._names], np.int64)
        # The number of each item's first box among those with as many dimensions.
        inner = np.zeros(len(counts), np.int64)
        for kind in set(self._dims):
            own = dims == kind
            inner[own] = np.cumsum(counts[own]) - counts[own]
        file, offset = np.full(total, -1, np.int32), np.zeros(total, np.int64)
        length, seen, kinds = np.zeros(total, np.int64), 0, sorted(set(self._dims))
        while self._peek(1) == _FETCH:
            kind, columns = self._next_places(kinds)
            item = self._look_up(columns[0], item_of)
            nth = np.zeros(len(item), np.int64) if kind == op.NUMBER else columns[1]
            where, begin, size = columns[-3:]
            is_sound = (
                (dims[item] == kind) & (nth >= 0) & (nth < counts[item])
                & (begin >= 0) & (begin < _NUMBER_MAX) & (size >= 1) & (size < _NUMBER_MAX)
            )  # fmt: skip
            if not is_sound.all():
                raise OtherForm("an impossible place")
            if kind > 0:
                its = offsets[kind][inner[item] + nth]
                # A place repeats the offsets of its box. If they differ, bytes would go to another
                # box.
                if not np.array_equal(its, np.stack(columns[2:-3], 1)):
                    raise OtherForm("a place of another box")
            self._look_up(where, item_of, is_key=False)
            row = first[item] + nth
            file[row], offset[row], length[row] = where - self._base, begin, size
            seen += len(row)
        # Each box has exactly one place, so no part of a tensor stays as it was.
        if seen != total or (file < 0).any():
            raise OtherForm("not one place for each box")
        return self._table(offsets, first, inner, (file, offset, length))

    def _next_places(self, kinds: list[int]) -> tuple[int, list[Int64s]]:
        """Read places of one kind, which moves to the front of `kinds`."""
        for kind in list(kinds):
            with contextlib.suppress(OtherForm):
                columns = self._records(kind, is_chunk=False)
                kinds.remove(kind)
                kinds.insert(0, kind)
                return kind, columns
        raise OtherForm("another kind of place")

    def _look_up(self, numbers: Int64s, item_of: Int64s, *, is_key: bool = True) -> Int64s:
        """Return the items of names in the memo. Raises `OtherForm` for other numbers."""
        number = numbers - self._base
        if (number < 0).any() or (number >= len(item_of)).any():
            raise OtherForm("a name that is not there")
        item: Int64s = item_of[number]
        if is_key and (item < 0).any():
            raise OtherForm("a place of no key")
        return item

    def _table(
        self,
        offsets: dict[int, Int64s],
        first: Int64s,
        inner: Int64s,
        places: tuple[Int32s, Int64s, Int64s],
    ) -> BoxTable:
        sizes = {kind: end_to_end(found, np.int64) for kind, found in self._sizes.items()}
        by_key, none = {}, np.zeros((1, 0), np.int64)
        for number, key in enumerate(self._keys):
            kind, count = self._dims[number], self._counts[number]
            own = slice(int(inner[number]), int(inner[number]) + count)
            rows = slice(int(first[number]), int(first[number]) + count)
            boxes = (sizes_of.get(kind) for sizes_of in (offsets, sizes))
            box = [none if one is None else one[own] for one in boxes]
            if kind != op.NUMBER and not count:
                box = [np.zeros((0, kind), np.int64)] * 2
            file, offset, length = places
            by_key[key] = SavedBoxes(box[0], box[1], file[rows], offset[rows], length[rows])
        if any(not name or "\0" in name for name in self._names):
            raise OtherForm("an impossible name")
        ends = np.full(len(self._names), -1, np.int64)
        np.maximum.at(ends, places[0], places[1] + places[2])
        extents = {self._names[file]: int(ends[file]) for file in np.flatnonzero(ends >= 0)}
        return BoxTable(tuple(self._names), by_key, extents)
