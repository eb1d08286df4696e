"""The bytes of `.metadata`, made from a plan's columns rather than from objects.

What `torch.distributed.checkpoint` reads is a pickle of its `Metadata`: an object for every box,
and two more for where the box lies. With ten million boxes, making and pickling those takes
minutes. Here every box is a record of opcodes with its numbers set in, all records of one number
of dimensions at once; names and file names are put into the pickle's memo beforehand. What comes
out is the same to any unpickler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

from holdfast.trainer.planning.columns import Int64s, Item
from holdfast.trainer.planning.global_plan import GlobalPlan

_DCP: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_CLASSES: Final = {
    "Metadata": _DCP,
    "TensorStorageMetadata": _DCP,
    "TensorProperties": _DCP,
    "ChunkStorageMetadata": _DCP,
    "BytesStorageMetadata": _DCP,
    "MetadataIndex": _DCP,
    "_MEM_FORMAT_ENCODING": _DCP,
    "_StorageInfo": _FILES,
    "Size": "torch",
    "_get_layout": "torch.serialization",
}
_WORDS: Final = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
_WIDE: Final = 1 << 31

# The opcodes that are used, by their names in `pickletools`.
_PROTO, _STOP, _POP, _MEMOIZE, _NONE, _FALSE = b"\x80\x04", b".", b"0", b"\x94", b"N", b"\x89"
_MARK, _TUPLE, _EMPTY_TUPLE, _EMPTY_LIST, _EMPTY_DICT = b"(", b"t", b")", b"]", b"}"
_NEWOBJ, _REDUCE, _BUILD, _APPEND, _SETITEM, _SETITEMS = b"\x81", b"R", b"b", b"a", b"s", b"u"
_GET, _INT, _LONG = b"j", b"J", b"\x8a\x08"

Bytes2d = npt.NDArray[np.uint8]
Piece = bytes | Bytes2d


def pickle_metadata(plan: GlobalPlan, file_name: Callable[[int], str]) -> bytes:
    """The pickle of DCP's `Metadata` for `plan`; `file_name` says a writer's file."""
    memo = _Memo()
    used = np.unique(plan.writer[plan.row]).tolist()
    files = {rank: memo.put(_text(file_name(rank))) for rank in used}
    keys = [memo.put(_text(item.key)) for item in plan.items]
    chunks, places = _records(plan, memo, np.array(keys), _lookup(files))
    whole: list[Piece] = [
        *_new(memo, "Metadata"),
        _MARK,
        *(_text("state_dict_metadata"), _EMPTY_DICT),
        *(p for n, i in enumerate(plan.items) for p in _entry(memo, keys[n], i, chunks.get(n))),
        *(_text("planner_data"), _EMPTY_DICT),
        *(p for n, i in enumerate(plan.items) for p in _path(keys[n], i)),
        *(_text("storage_data"), _EMPTY_DICT),
        *places,
        *(_text("storage_meta"), _NONE),
        *(_text("version"), _text(CURRENT_DCP_VERSION)),
        *(_SETITEMS, _BUILD, _STOP),
    ]
    return b"".join(cast(list[bytes], [_PROTO, *memo.pieces, *whole]))


class _Memo:
    """What is put into the pickle's memo before it begins, by number."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._count = 0
        self._classes = {
            name: self.put(b"c" + f"{module}\n{name}\n".encode())
            for name, module in _CLASSES.items()
        }
        self._words = {word: self.put(_text(word)) for word in _WORDS}

    def put(self, content: bytes) -> int:
        self.pieces += [content, _MEMOIZE, _POP]
        self._count += 1
        return self._count - 1

    def get(self, name: str) -> bytes:
        """The opcode that fetches a class or an attribute's name."""
        return _fetch(self._classes[name] if name in self._classes else self._words[name])


class _Template:
    """A record of opcodes with places for numbers."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.slots: list[tuple[int, int, Int64s]] = []

    def add(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.content += piece

    def fetch(self, numbers: Int64s) -> None:
        """Each record's own object of the memo."""
        self._slot(_GET, 4, numbers)

    def integer(self, numbers: Int64s) -> None:
        is_wide = bool(len(numbers)) and int(numbers.max()) >= _WIDE
        self._slot(_LONG if is_wide else _INT, 8 if is_wide else 4, numbers)

    def size(self, memo: _Memo, columns: Sequence[Int64s]) -> None:
        """A `torch.Size` of each record's numbers, a column for each dimension."""
        self.add(memo.get("Size"), _MARK)
        for column in columns:
            self.integer(column)
        self.add(_TUPLE, b"\x85", _REDUCE)

    def records(self, count: int) -> Bytes2d:
        """All records, one under another: shape (count, length of one)."""
        table = np.empty((count, len(self.content)), dtype=np.uint8)
        table[:] = np.frombuffer(bytes(self.content), dtype=np.uint8)
        for at, width, numbers in self.slots:
            octets = np.ascontiguousarray(numbers, dtype="<i8").view(np.uint8).reshape(count, 8)
            table[:, at : at + width] = octets[:, :width]
        return table

    def _slot(self, opcode: bytes, width: int, numbers: Int64s) -> None:
        self.add(opcode)
        self.slots.append((len(self.content), width, numbers))
        self.add(bytes(width))


def _records(
    plan: GlobalPlan, memo: _Memo, keys: Int64s, files: Int64s
) -> tuple[dict[int, Bytes2d], list[Bytes2d]]:
    """Each tensor's chunks, by the number of its item, and all places of boxes and numbers."""
    chunks: dict[int, Bytes2d] = {}
    places: list[Bytes2d] = []
    kinds = np.array([-1 if i.dtype is None else len(i.shape) for i in plan.items], dtype=np.int64)
    kind_of_row = kinds[plan.key[plan.row]]
    for kind in np.unique(kinds).tolist():
        row = plan.row[kind_of_row == kind]
        key = plan.key[row]
        where = _Template()
        where.add(*_new(memo, "MetadataIndex"), _MARK, memo.get("fqn"))
        where.fetch(keys[key])
        if kind < 0:
            where.add(memo.get("index"), _NONE)
        else:
            offsets, sizes = _box_columns(plan, row, key, kind)
            first = np.searchsorted(key, np.arange(len(plan.items) + 1))
            chunk = _chunk(memo, offsets, sizes).records(len(row))
            chunks |= {
                n: chunk[first[n] : first[n + 1]] for n in np.flatnonzero(kinds == kind).tolist()
            }
            where.add(memo.get("index"))
            where.integer(np.arange(len(row)) - first[key])
            where.add(memo.get("offset"))
            where.size(memo, offsets)
        where.add(_SETITEMS, _BUILD)
        _add_place(where, memo, files[plan.writer[row]], plan.offset[row], plan.length[row])
        places.append(where.records(len(row)))
    return chunks, places


def _box_columns(
    plan: GlobalPlan, row: Int64s, key: Int64s, dims: int
) -> tuple[list[Int64s], list[Int64s]]:
    """Offsets and sizes of boxes with `dims` dimensions, a column for each dimension."""
    shapes = np.ones((len(plan.items), dims), dtype=np.int64)
    for number, item in enumerate(plan.items):
        if item.dtype is not None and len(item.shape) == dims:
            shapes[number] = item.shape
    shapes = np.maximum(shapes, 1)
    offsets, rest = [], plan.place[row].copy()
    for dim in reversed(range(dims)):
        extent = shapes[key, dim]
        offsets.append(rest % extent)
        rest //= extent
    form = plan.form[row]
    return offsets[::-1], [plan.form_sizes[form, dim] for dim in range(dims)]


def _chunk(memo: _Memo, offsets: Sequence[Int64s], sizes: Sequence[Int64s]) -> _Template:
    chunk = _Template()
    chunk.add(*_new(memo, "ChunkStorageMetadata"), _MARK, memo.get("offsets"))
    chunk.size(memo, offsets)
    chunk.add(memo.get("sizes"))
    chunk.size(memo, sizes)
    chunk.add(_SETITEMS, _BUILD, _APPEND)
    return chunk


def _add_place(record: _Template, memo: _Memo, file: Int64s, at: Int64s, length: Int64s) -> None:
    record.add(*_new(memo, "_StorageInfo"), _MARK, memo.get("relative_path"))
    record.fetch(file)
    record.add(memo.get("offset"))
    record.integer(at)
    record.add(memo.get("length"))
    record.integer(length)
    record.add(_SETITEMS, _BUILD, _SETITEM)


def _entry(memo: _Memo, key: int, item: Item, chunks: Bytes2d | None) -> list[Piece]:
    """One key of `state_dict_metadata`."""
    if item.dtype is None:
        return [_fetch(key), *_new(memo, "BytesStorageMetadata", state=False), _SETITEM]
    properties: list[Piece] = [
        memo.get("TensorProperties"),
        *(_EMPTY_TUPLE, _NEWOBJ, _MARK),
        b"c" + f"torch\n{item.dtype}\n".encode(),
        *(memo.get("_get_layout"), _text("torch.strided"), b"\x85", _REDUCE),
        _FALSE,
        *(memo.get("_MEM_FORMAT_ENCODING"), b"K\x00", b"\x85", _REDUCE),
        *(_FALSE, _TUPLE, _BUILD),
    ]
    size = b"".join(_LONG + extent.to_bytes(8, "little") for extent in item.shape)
    return [
        _fetch(key),
        *_new(memo, "TensorStorageMetadata"),
        *(_MARK, _text("properties"), *properties),
        *(_text("size"), memo.get("Size"), _MARK, size, _TUPLE, b"\x85", _REDUCE),
        *(_text("chunks"), _EMPTY_LIST),
        *([] if chunks is None else [chunks]),
        *(_SETITEMS, _BUILD, _SETITEM),
    ]


def _path(key: int, item: Item) -> list[bytes]:
    """One key of `planner_data`: the path by which the state can be nested again."""
    parts = [_text(p) if isinstance(p, str) else b"J" + p.to_bytes(4, "little") for p in item.path]
    return [_fetch(key), _MARK, *parts, _TUPLE, _SETITEM]


def _new(memo: _Memo, name: str, *, state: bool = True) -> list[bytes]:
    """A new object of a class, and a dict for its attributes to be filled and built in."""
    return [memo.get(name), _EMPTY_TUPLE, _NEWOBJ, *([_EMPTY_DICT] if state else [])]


def _lookup(numbers: dict[int, int]) -> Int64s:
    """The same mapping as an array, for columns to be mapped at once."""
    table = np.zeros(max(numbers, default=-1) + 1, dtype=np.int64)
    for number, value in numbers.items():
        table[number] = value
    return table


def _fetch(number: int) -> bytes:
    return _GET + number.to_bytes(4, "little")


def _text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return b"X" + len(content).to_bytes(4, "little") + content
