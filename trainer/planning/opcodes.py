"""Pickle opcodes in bulk: objects stored once in the memo, and records with slots for numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.trainer.planning.columns import Int64s

# The opcodes in use, by their names in `pickletools`.
PROTO, STOP, POP, MEMOIZE, NONE, FALSE = b"\x80\x04", b".", b"0", b"\x94", b"N", b"\x89"
MARK, TUPLE, EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT = b"(", b"t", b")", b"]", b"}"
TUPLE1, NEWOBJ, REDUCE, BUILD = b"\x85", b"\x81", b"R", b"b"
APPEND, SETITEM, SETITEMS = b"a", b"s", b"u"
INT, LONG = b"J", b"\x8a\x08"
_GET: Final = b"j"
_WIDE: Final = 1 << 31

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


class Template:
    """A record of opcodes with slots for numbers, which are set for many records at once."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._slots: list[tuple[int, str]] = []
        self._table: Octets = np.zeros((0, 0), dtype=np.uint8)

    @property
    def record_bytes(self) -> int:
        """The length of a record in bytes."""
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
        if largest < _WIDE:
            self._slot(INT, "<i4")
        else:
            self._slot(LONG, "<i8")

    def records(self, count: int, columns: Sequence[Int64s]) -> Octets:
        """Return all records, in shape (count, bytes). `columns` has one column per slot, in order.

        The result is valid until the next call.
        """
        if len(self._table) < count:
            self._table = np.empty((count, self.record_bytes), dtype=np.uint8)
            self._table[:] = np.frombuffer(bytes(self._content), dtype=np.uint8)
        table = self._table[:count]
        for (at, form), column in zip(self._slots, columns, strict=True):
            place = np.ndarray(
                count, dtype=form, buffer=table, offset=at, strides=(self.record_bytes,)
            )
            place[:] = column
        return table

    def _slot(self, opcode: bytes, form: str) -> None:
        self.add(opcode)
        self._slots.append((self.record_bytes, form))
        self.add(bytes(np.dtype(form).itemsize))


def fetch(number: int) -> bytes:
    """Return the opcode that fetches an object of the memo."""
    return _GET + number.to_bytes(4, "little")


def text(content: str) -> bytes:
    """Return the opcode of a string."""
    octets = content.encode("utf-8", "surrogatepass")
    return b"X" + len(octets).to_bytes(4, "little") + octets
