"""The opcodes of a `.metadata` pickle, in bulk: records with slots for numbers, filled column-wise.

Objects that many records refer to are stored once in the memo. `planning.metadata_pickle` fills in
the numbers of a plan. `column_reader` compares a file with the same records and takes the numbers
out.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from holdfast.trainer.format.columns import Int64s
from holdfast.trainer.format.metadata_makers import PROPERTIES

# The opcodes in use, by their names in `pickletools`.
PROTO, STOP, POP, MEMOIZE, NONE, FALSE = b"\x80\x04", b".", b"0", b"\x94", b"N", b"\x89"
MARK, TUPLE, EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT = b"(", b"t", b")", b"]", b"}"
TUPLE1, NEWOBJ, REDUCE, BUILD = b"\x85", b"\x81", b"R", b"b"
APPEND, SETITEM, SETITEMS = b"a", b"s", b"u"
INT, LONG = b"J", b"\x8a\x08"
_GET: Final = b"j"
_WIDE: Final = 1 << 31
_WORD: Final = 8
# Records that are compared together. Their numbers fit into a core's cache.
COMPARED_AT_ONCE: Final = 8192
COMPARED_FIRST: Final = 64

Octets = npt.NDArray[np.uint8]


class Memo:
    """The objects that are put into the pickle's memo before its main part, by number."""

    def __init__(self, classes: Mapping[str, str], attributes: Sequence[str]) -> None:
        """`classes` has the module of each class. `attributes` are attribute names."""
        self.pieces: list[bytes] = []
        self._count = 0
        self._names = {
            name: self.put(b"c" + f"{module}\n{name}\n".encode())
            for name, module in classes.items()
        }
        self._names |= {name: self.put(text(name)) for name in attributes}

    def put(self, content: bytes) -> int:
        """Store the object that these opcodes create, and return its memo number."""
        self.pieces += [content, MEMOIZE, POP]
        self._count += 1
        return self._count - 1

    def get(self, name: str) -> bytes:
        """Return the opcode that fetches a class or an attribute name."""
        return fetch(self._names[name])

    def new(self, name: str, *, state: bool = True) -> list[bytes]:
        """Return opcodes for a new object of a class, and a dict to fill and build it from."""
        return [self.get(name), EMPTY_TUPLE, NEWOBJ, *([EMPTY_DICT] if state else [])]


class RecordTemplate:
    """A record of opcodes with slots for numbers, which are set for many records together."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._slots: list[tuple[int, str]] = []
        self._table: Octets = np.zeros((0, 0), dtype=np.uint8)
        self._known: tuple[int, int] | None = None

    @property
    def record_bytes(self) -> int:
        return len(self._content)

    def add(self, *pieces: bytes) -> None:
        """Add opcodes that are the same in every record."""
        for piece in pieces:
            self._content += piece

    def fetch(self) -> None:
        """Add a slot for the memo number of each record's own object."""
        self._slot(_GET, "<u4")

    def integer(self, largest: int) -> None:
        """Add a slot for each record's own number, from 0 to `largest`."""
        # Fixed widths, so that all numbers of a column can be set with one numpy assignment.
        if largest < _WIDE:
            self._slot(INT, "<i4")
        else:
            self._slot(LONG, "<i8")

    def records(self, count: int, columns: Sequence[Int64s]) -> Octets:
        """Return all records, in shape (count, bytes). `columns` has one column per slot, in order.

        The result is valid until the next call.
        """
        if len(self._table) < count:
            # Kept between calls: only the numbers change, and the opcodes are already in place.
            self._table = np.empty((count, self.record_bytes), dtype=np.uint8)
            self._table[:] = np.frombuffer(bytes(self._content), dtype=np.uint8)
        table = self._table[:count]
        for (at, form), column in zip(self._slots, columns, strict=True):
            place = np.ndarray(
                count, dtype=form, buffer=table, offset=at, strides=(self.record_bytes,)
            )
            place[:] = column
        return table

    def read(self, content: bytes, at: int) -> tuple[list[Int64s], int]:
        """Return the numbers of the consecutive records that begin at `at`, and their count.

        There is a column for each slot. The count is 0 if no record of this form begins there.
        """
        size, most = self.record_bytes, (len(content) - at) // self.record_bytes
        # One comparison of long integers decides about the first record. Most entries have only
        # one.
        fixed, mask = self._words()
        first = int.from_bytes(content[at : at + size], "little")
        count = int(most > 0 and first & mask == fixed)
        # The start of a record has no slot, so it shows whether there is a second one.
        if count and content[at + size : at + size + _WORD] == self._content[:_WORD]:
            count = self._count(np.frombuffer(content, np.uint8, most * size, at))
        columns = [
            np.ndarray(count, form, content, at + slot, (size,)).astype(np.int64)
            for slot, form in self._slots
            if count
        ]
        return columns, count

    def _count(self, octets: Octets) -> int:
        """Return how many records `octets` begins with. Every byte outside a slot is compared."""
        size = self.record_bytes
        fixed, mask = (number.to_bytes(size, "little") for number in self._words())
        most, count = len(octets) // size, 0
        while count < most:
            # As many as have matched, because the next entry's head may follow soon.
            rows = min(max(COMPARED_FIRST, count), COMPARED_AT_ONCE, most - count)
            differs = np.zeros(rows, dtype=np.uint64)
            # By words of 8 bytes. The last word overlaps the one before it, so a record may have
            # any length.
            for at in [*range(0, size - _WORD, _WORD), size - _WORD]:
                word = np.ndarray(rows, "<u8", octets, count * size + at, (size,))
                differs |= (word ^ np.frombuffer(fixed, "<u8", 1, at)) & np.frombuffer(
                    mask, "<u8", 1, at
                )
            if differs.any():
                return count + int(np.flatnonzero(differs)[0])
            count += rows
        return count

    def _words(self) -> tuple[int, int]:
        """Return a record's fixed bytes, and a mask of where they are, as long numbers."""
        if self._known is not None:
            return self._known
        mask = bytearray(b"\xff" * self.record_bytes)
        for at, form in self._slots:
            width = np.dtype(form).itemsize
            mask[at : at + width] = bytes(width)
        self._known = int.from_bytes(self._content, "little"), int.from_bytes(mask, "little")
        return self._known

    def _slot(self, opcode: bytes, form: str) -> None:
        self.add(opcode)
        self._slots.append((self.record_bytes, form))
        self.add(bytes(np.dtype(form).itemsize))


class FittedTemplate(RecordTemplate):
    """A record whose numbers have the widths that they have in `content`, at `start`."""

    def __init__(self, content: bytes, start: int) -> None:
        super().__init__()
        self._source, self._start = content, start

    def integer(self, largest: int) -> None:
        """Add a slot as wide as the number in the content. `largest` is not used."""
        at = self._start + self.record_bytes
        is_wide = self._source[at : at + 1] == LONG[:1]
        super().integer(_WIDE if is_wide else 0)


def fetch(number: int) -> bytes:
    """Return the opcode that fetches an object of the memo."""
    return _GET + number.to_bytes(4, "little")


def text(content: str) -> bytes:
    octets = content.encode("utf-8", "surrogatepass")
    return b"X" + len(octets).to_bytes(4, "little") + octets


# --- what is written for one box and for one entry -------------------------------------------

_DCP: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
CLASSES: Final = {
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
ATTRIBUTES: Final = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
# Stands for a number (no tensor) where a number of dimensions is expected.
NUMBER: Final = -1


def add_chunk(record: RecordTemplate, memo: Memo, largest: Sequence[int]) -> None:
    """Add one box in the list `chunks`. `largest` is the maximum per dimension."""
    record.add(*memo.new("ChunkStorageMetadata"), MARK, memo.get("offsets"))
    _add_size(record, memo, largest)
    record.add(memo.get("sizes"))
    _add_size(record, memo, largest)
    record.add(SETITEMS, BUILD, APPEND)


def add_place(
    record: RecordTemplate,
    memo: Memo,
    largest: Sequence[int] | None,
    nth: int,
    file_bytes: int,
    entry_bytes: int,
) -> None:
    """Add one box in `storage_data`. `largest` is None for a number; the others are maxima."""
    record.add(*memo.new("MetadataIndex"), MARK, memo.get("fqn"))
    record.fetch()
    record.add(memo.get("index"))
    if largest is None:
        record.add(NONE)
    else:
        record.integer(nth)
        record.add(memo.get("offset"))
        _add_size(record, memo, largest)
    record.add(SETITEMS, BUILD)
    record.add(*memo.new("_StorageInfo"), MARK, memo.get("relative_path"))
    record.fetch()
    record.add(memo.get("offset"))
    record.integer(file_bytes)
    record.add(memo.get("length"))
    record.integer(entry_bytes)
    record.add(SETITEMS, BUILD, SETITEM)


def _add_size(record: RecordTemplate, memo: Memo, largest: Sequence[int]) -> None:
    """Add a `torch.Size` of each record's numbers. `largest` is the maximum per dimension."""
    record.add(memo.get("Size"), MARK)
    for extent in largest:
        record.integer(extent)
    record.add(TUPLE, TUPLE1, REDUCE)


def number_entry(memo: Memo) -> bytes:
    """Return what follows the key of a number in `state_dict_metadata`."""
    return b"".join([*memo.new("BytesStorageMetadata", state=False), SETITEM])


def tensor_entry(memo: Memo) -> tuple[bytes, bytes, bytes]:
    """Return what stands around the dtype and the shape of a tensor in `state_dict_metadata`."""
    before = [
        *(*memo.new("TensorStorageMetadata"), MARK, text("properties")),
        *(memo.get("TensorProperties"), EMPTY_TUPLE, NEWOBJ, MARK, b"ctorch\n"),
    ]
    between = [
        *(b"\n", memo.get("_get_layout"), text("torch.strided"), TUPLE1, REDUCE, FALSE),
        *(memo.get("_MEM_FORMAT_ENCODING"), b"K\x00", TUPLE1, REDUCE, FALSE, TUPLE, BUILD),
        *(text("size"), memo.get("Size"), MARK),
    ]
    after = [TUPLE, TUPLE1, REDUCE, text("chunks"), EMPTY_LIST]
    return b"".join(before), b"".join(between), b"".join(after)


# --- a whole pickle, and what is appended to it for one save ---------------------------------

# What stock DCP records of one save in `.metadata`: its directory and its id.
#
# `.metadata` is built once for many saves. So this is appended to it: the opcodes replace its
# `STOP`.

# Paths have at most 4096 bytes.
STORAGE_META_BYTES_MAX: Final = 8192
_NAME: Final = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n"
# Before the directory, between it and the id, and after the id.
BEFORE: Final = b"".join(
    [
        *(EMPTY_DICT, MARK, text("storage_meta")),
        *(_NAME, EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK, text("checkpoint_id")),
    ]
)
BETWEEN: Final = text("save_id")
AFTER: Final = b"".join(
    [
        *(text("load_id"), NONE, text("modules"), EMPTY_LIST, SETITEMS, BUILD),
        *(SETITEMS, BUILD, STOP),
    ]
)


def encode_storage_meta(directory: str, save_id: str) -> bytes:
    """Return the opcodes that set `storage_meta` of the metadata before them."""
    return b"".join([BEFORE, text(directory), BETWEEN, text(save_id), AFTER])


def dump_metadata(metadata: Metadata) -> bytes:
    """Return the pickle of `metadata`, with the tensor properties that torch 2.14 and older have.

    Their `__setstate__` fails if there are more. Later ones accept the shorter form.
    """
    stream = io.BytesIO()
    _Pickler(stream).dump(metadata)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        """Shorten the state of tensor properties. Everything else is pickled as usual."""
        if type(item) is TensorProperties:
            state: Any = item.__getstate__()  # type: ignore[no-untyped-call]
            new = copyreg.__newobj__  # type: ignore[attr-defined]
            return new, (TensorProperties,), state[:PROPERTIES]
        return NotImplemented
