"""A reader of pickles that a stranger may have made: it builds plain values and runs nothing.

Python's own unpickler looks names up, sets attributes of whatever it is told to, allots memory by
numbers in the file, and hashes keys that take forever. Here a name stands for a `Maker` that the
caller wrote down, attributes are set by the caller's functions alone, and what is allotted is
bounded by the bytes that were read. Opcodes that neither DCP nor `torch.save` writes are refused.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.contracts.collector import pause_collection

# The longest text, by default: names of keys and files, and what is said of them.
TEXT_BYTES_MAX: Final = 1 << 20
_WINDOW: Final = 4 * TEXT_BYTES_MAX
_STACK_MAX: Final = 1 << 20
_KEY_ITEMS_MAX: Final = 64
_NAME_BYTES_MAX: Final = 1000
# DCP has a list or dict in every 20 bytes; each takes some 60 bytes of memory.
_CONTAINERS_FREE: Final = 1000
_BYTES_PER_CONTAINER: Final = 8
_PROTOCOL_MAX: Final = 5
_SCALARS: Final[frozenset[type]] = frozenset(
    {str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.layout}
)

_U2: Final = struct.Struct("<H").unpack_from
_U4: Final = struct.Struct("<I").unpack_from
_I4: Final = struct.Struct("<i").unpack_from
_U8: Final = struct.Struct("<Q").unpack_from
_F8: Final = struct.Struct(">d").unpack_from


class RefusedPickle(ValueError):
    """A pickle that is torn, or does what no checkpoint's does."""


@dataclass(frozen=True)
class Maker:
    """What a name in a pickle stands for; the pickle can do nothing else with it.

    `new` makes an object without arguments, `call` one of the arguments given.
    """

    name: str
    new: Callable[[], Any] | None = None
    call: Callable[..., Any] | None = None


Build = Callable[[Any, Any], None]
Find = Callable[[str, str], Any]


def read_pickle(
    chunks: Iterator[bytes],
    find: Find,
    builds: Mapping[type, Build],
    *,
    keys: frozenset[type] = frozenset(),
    persistent: Callable[[Any], Any] | None = None,
    text_max: int = TEXT_BYTES_MAX,
) -> Any:
    """The value pickled in `chunks`, which are its bytes in pieces of any size.

    Args:
        chunks: read as far as the pickle goes.
        find: what (module, name) stands for, mostly a `Maker`; raises `RefusedPickle`.
        builds: by type, what gives an object its saved state, in place.
        keys: types, beside scalars and flat tuples, that may be keys; their hash must be cheap.
        persistent: what a persistent id stands for; without it there may be none.
        text_max: the longest text or bytes there may be, in bytes.

    Raises `RefusedPickle`, or any `Exception` that `find`, a `Maker` or a `Build` raises.
    """
    with pause_collection():
        return _Machine(chunks, find, builds, keys | _SCALARS, persistent, text_max).run()


class _Machine:
    """A stack, a memo, and a window of the bytes."""

    def __init__(
        self,
        chunks: Iterator[bytes],
        find: Find,
        builds: Mapping[type, Build],
        keys: frozenset[type],
        persistent: Callable[[Any], Any] | None,
        text_max: int,
    ) -> None:
        self._chunks, self._find, self._builds = chunks, find, builds
        # A window holds this much beyond an opcode, unless the pickle ends there.
        self._text_max, self._margin = text_max, max(text_max, _NAME_BYTES_MAX) + 64
        self._keys, self._persistent = keys, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._data, self._at, self._stop = b"", 0, 0
        self._room = _CONTAINERS_FREE
        self._is_over = False
        self._rare = {ord(code): getattr(self, name) for code, name in _RARE.items()}

    def run(self) -> Any:
        """Follow the opcodes to the end; the commonest are here, all others in `_rare`."""
        stack, marks, memo, rare = self._stack, self._marks, self._memo, self._rare
        push = stack.append
        while not self._is_over:
            self._refill()
            data, at, stop = self._data, self._at, self._stop
            while at < stop:
                code = data[at]
                at += 1
                if code == 0x6A:  # LONG_BINGET
                    push(memo[_U4(data, at)[0]])
                    at += 4
                elif code == 0x68:  # BINGET
                    push(memo[data[at]])
                    at += 1
                elif code == 0x4A:  # BININT
                    push(_I4(data, at)[0])
                    at += 4
                elif code == 0x4B:  # BININT1
                    push(data[at])
                    at += 1
                elif code == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                elif code == 0x28:  # MARK
                    marks.append(len(stack))
                elif code == 0x74:  # TUPLE
                    begin = marks.pop()
                    stack[begin:] = [tuple(stack[begin:])]
                elif code == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                else:
                    act = rare.get(code)
                    if act is None:
                        raise RefusedPickle(f"opcode {code:#04x}, which no checkpoint has")
                    self._at = at
                    act()
                    at = self._at
                    if self._is_over:
                        break
            self._at = at
        if len(stack) != 1:
            raise RefusedPickle("it ends with more or less than one value")
        return stack[0]

    # --- bytes ----------------------------------------------------------------------------

    def _refill(self) -> None:
        """Move the window on; raises when the pickle has ended without its last opcode."""
        if len(self._stack) > _STACK_MAX or len(self._marks) > _STACK_MAX:
            raise RefusedPickle("values upon values that nothing takes up")
        pieces, size, is_last = [self._data[self._at :]], len(self._data) - self._at, False
        while size < _WINDOW + self._margin and not is_last:
            piece = next(self._chunks, b"")
            is_last = not piece
            pieces.append(piece)
            size += len(piece)
            self._room += len(piece) // _BYTES_PER_CONTAINER
        self._data, self._at = b"".join(pieces), 0
        self._stop = size if is_last else size - self._margin
        if not size:
            raise RefusedPickle("it ends early")

    def _take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self._text_max:
            raise RefusedPickle(f"a value of {count} bytes, expected {self._text_max} or less")
        begin, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise RefusedPickle("it ends early")
        return self._data[begin : self._at]

    def _number(self, unpack: Callable[..., tuple[Any, ...]], size: int) -> Any:
        return unpack(self._take(size))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + _NAME_BYTES_MAX)
        if end < 0:
            raise RefusedPickle("a name without an end")
        return self._take(end + 1 - self._at)[:-1].decode()

    def _proto(self) -> None:
        if self._take(1)[0] > _PROTOCOL_MAX:
            raise RefusedPickle("an unknown protocol")

    def _frame(self) -> None:
        self._take(8)

    def _end(self) -> None:
        self._is_over = True

    # --- values ---------------------------------------------------------------------------

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _binint2(self) -> None:
        self._stack.append(self._number(_U2, 2))

    def _binfloat(self) -> None:
        self._stack.append(self._number(_F8, 8))

    def _long1(self) -> None:
        content = self._take(self._take(1)[0])
        self._stack.append(int.from_bytes(content, "little", signed=True))

    def _short_text(self) -> None:
        self._text(self._take(1)[0])

    def _text4(self) -> None:
        self._text(self._number(_U4, 4))

    def _text8(self) -> None:
        self._text(self._number(_U8, 8))

    def _text(self, count: int) -> None:
        self._stack.append(self._take(count).decode("utf-8", "surrogatepass"))

    def _short_bytes(self) -> None:
        self._stack.append(self._take(self._take(1)[0]))

    def _bytes4(self) -> None:
        self._stack.append(self._take(self._number(_U4, 4)))

    def _bytes8(self) -> None:
        self._stack.append(self._take(self._number(_U8, 8)))

    def _bytearray8(self) -> None:
        self._stack.append(bytearray(self._take(self._number(_U8, 8))))

    def _get_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise RefusedPickle("a name that is no text")
        self._stack.append(self._find(module, name))

    def _global(self) -> None:
        module = self._line()
        self._stack.append(self._find(module, self._line()))

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise RefusedPickle("a reference to something outside of it")
        self._stack.append(self._persistent(self._stack.pop()))

    # --- memo and stack -------------------------------------------------------------------

    def _binput(self) -> None:
        self._memo[self._take(1)[0]] = self._stack[-1]

    def _long_binput(self) -> None:
        self._memo[self._number(_U4, 4)] = self._stack[-1]

    def _pop(self) -> None:
        self._stack.pop()

    def _since_mark(self) -> list[Any]:
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    # --- collections ----------------------------------------------------------------------

    def _contain(self, empty: Any) -> None:
        """Push a collection, as long as there are not too many for the bytes that were read."""
        self._room -= 1
        if self._room < 0:
            raise RefusedPickle("more collections than a checkpoint of its size has")
        self._stack.append(empty)

    def _empty_list(self) -> None:
        self._contain([])

    def _empty_dict(self) -> None:
        self._contain({})

    def _empty_set(self) -> None:
        self._contain(set())

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _tuple2(self) -> None:
        self._stack[-2:] = [tuple(self._stack[-2:])]

    def _tuple3(self) -> None:
        self._stack[-3:] = [tuple(self._stack[-3:])]

    def _frozen(self) -> None:
        self._stack.append(frozenset(self._checked_keys(self._since_mark())))

    def _append(self) -> None:
        item = self._stack.pop()
        self._top(list).append(item)

    def _appends(self) -> None:
        items = self._since_mark()
        self._top(list).extend(items)

    def _add(self) -> None:
        items = self._since_mark()
        self._top(set).update(self._checked_keys(items))

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._checked_keys((key,))
        self._top(dict, OrderedDict)[key] = value

    def _set_items(self) -> None:
        items = self._since_mark()
        keys, target = items[::2], self._top(dict, OrderedDict)
        target.update(zip(self._checked_keys(keys), items[1::2], strict=True))

    def _top(self, *types: type) -> Any:
        """What the stack ends with, which must be of one of these very types."""
        if type(self._stack[-1]) not in types:
            raise RefusedPickle(f"items for a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _checked_keys(self, keys: Any) -> Any:
        """`keys` themselves, none of which takes long to hash."""
        if not self._keys.issuperset(map(type, keys)):
            for key in keys:
                if type(key) not in self._keys and not is_cheap(key):
                    raise RefusedPickle(f"a key of type {type(key).__name__}")
        return keys

    # --- objects --------------------------------------------------------------------------

    def _new_object(self) -> None:
        arguments, maker = self._stack.pop(), self._stack.pop()
        if type(maker) is not Maker or maker.new is None or arguments != ():
            raise RefusedPickle("an object made of what cannot make one")
        self._contain(maker.new())

    def _reduce(self) -> None:
        arguments, maker = self._stack.pop(), self._stack.pop()
        if type(maker) is not Maker or maker.call is None or type(arguments) is not tuple:
            raise RefusedPickle("a call of what cannot be called")
        self._stack.append(maker.call(*arguments))

    def _build(self) -> None:
        state = self._stack.pop()
        build = self._builds.get(type(self._stack[-1]))
        if build is None:
            raise RefusedPickle(f"attributes for a {type(self._stack[-1]).__name__}")
        # In place: the memo has the object already.
        build(self._stack[-1], state)


def is_cheap(key: Any) -> bool:
    """True for what is soon hashed: a scalar, or a short tuple of scalars."""
    return type(key) in _SCALARS or (
        type(key) in {tuple, torch.Size}
        and len(key) <= _KEY_ITEMS_MAX
        and all(type(part) in _SCALARS for part in key)
    )


_RARE: Final = {
    "\x80": "_proto",
    "\x95": "_frame",
    ".": "_end",
    "N": "_none",
    "\x88": "_true",
    "\x89": "_false",
    "M": "_binint2",
    "G": "_binfloat",
    "\x8a": "_long1",
    "\x8c": "_short_text",
    "X": "_text4",
    "\x8d": "_text8",
    "C": "_short_bytes",
    "B": "_bytes4",
    "\x8e": "_bytes8",
    "\x96": "_bytearray8",
    "\x93": "_get_stack_global",
    "c": "_global",
    "Q": "_persistent_id",
    "q": "_binput",
    "r": "_long_binput",
    "0": "_pop",
    "]": "_empty_list",
    "}": "_empty_dict",
    "\x8f": "_empty_set",
    ")": "_empty_tuple",
    "\x86": "_tuple2",
    "\x87": "_tuple3",
    "\x91": "_frozen",
    "a": "_append",
    "e": "_appends",
    "\x90": "_add",
    "s": "_set_item",
    "u": "_set_items",
    "\x81": "_new_object",
    "R": "_reduce",
    "b": "_build",
}
