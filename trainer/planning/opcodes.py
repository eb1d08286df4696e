"""Pickle opcodes in bulk: objects put into the memo once, and records with room for numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.trainer.planning.columns import Int64s

# The opcodes that are used, by their names in `pickletools`.
PROTO, STOP, POP, MEMOIZE, NONE, FALSE = b"\x80\x04", b".", b"0", b"\x94", b"N", b"\x89"
MARK, TUPLE, EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT = b"(", b"t", b")", b"]", b"}"
TUPLE1, NEWOBJ, REDUCE, BUILD = b"\x85", b"\x81", b"R", b"b"
APPEND, SETITEM, SETITEMS = b"a", b"s", b"u"
INT, LONG = b"J", b"\x8a\x08"
_GET: Final = b"j"
_WIDE: Final = 1 << 31

Octets = npt.NDArray[np.uint8]


class Memo:
    """What is put into the pickle's memo before it begins, by number."""

    def __init__(self, classes: Mapping[str, str], words: Sequence[str]) -> None:
        """`classes` has the module of each class, `words` are the attributes' names."""
        self.pieces: list[bytes] = []
        self._count = 0
        self._names = {
            name: self.put(b"c" + f"{module}\n{name}\n".encode())
            for name, module in classes.items()
        }
        self._names |= {word: self.put(text(word)) for word in words}

    def put(self, content: bytes) -> int:
        """The number under which what these opcodes make can be fetched."""
        self.pieces += [content, MEMOIZE, POP]
        self._count += 1
        return self._count - 1

    def get(self, name: str) -> bytes:
        """The opcode that fetches a class or an attribute's name."""
        return fetch(self._names[name])

    def new(self, name: str, *, state: bool = True) -> list[bytes]:
        """A new object of a class, and a dict for its attributes to be filled and built in."""
        return [self.get(name), EMPTY_TUPLE, NEWOBJ, *([EMPTY_DICT] if state else [])]


class Template:
    """A record of opcodes with places for numbers, which are set for many records at once."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._slots: list[tuple[int, str]] = []
        self._table: Octets = np.zeros((0, 0), dtype=np.uint8)

    @property
    def record_bytes(self) -> int:
        """The length of a record."""
        return len(self._content)

    def add(self, *pieces: bytes) -> None:
        """Opcodes that are the same in every record."""
        for piece in pieces:
            self._content += piece

    def fetch(self) -> None:
        """Each record's own object of the memo, by its number."""
        self._slot(_GET, "<u4")

    def integer(self, largest: int) -> None:
        """Each record's own number, which is `largest` at most and not negative."""
        if largest < _WIDE:
            self._slot(INT, "<i4")
        else:
            self._slot(LONG, "<i8")

    def records(self, count: int, columns: Sequence[Int64s]) -> Octets:
        """All records, shape (count, bytes), with a column for each place, in order.

        They are good until the next call.
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
    """The opcode that fetches an object of the memo."""
    return _GET + number.to_bytes(4, "little")


def text(content: str) -> bytes:
    """A string."""
    octets = content.encode("utf-8", "surrogatepass")
    return b"X" + len(octets).to_bytes(4, "little") + octets
