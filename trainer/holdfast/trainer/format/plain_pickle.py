"""A reader for untrusted pickles: it builds plain values and never runs code.

Python's own unpickler imports any name, sets attributes of any object, allocates as much memory as
the file asks for, and hashes keys at any cost. In this reader a name stands for a `Maker` that the
caller provides, only the caller's functions set attributes, and memory is bounded by the bytes that
were read. Opcodes that neither DCP nor `torch.save` writes are refused.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from holdfast.trainer.process.collector import pause_collection

# The default limit of a text's length. Texts are mostly names of keys and files.
TEXT_BYTES_MAX: Final = 1 << 20
_WINDOW: Final = 4 * TEXT_BYTES_MAX
_STACK_MAX: Final = 1 << 20
_KEY_ITEMS_MAX: Final = 64
_NAME_BYTES_MAX: Final = 1000
# DCP has at most one list or dict in 20 bytes. Each takes about 60 bytes of memory.
_CONTAINERS_FREE: Final = 1000
_BYTES_PER_CONTAINER: Final = 8
_PROTOCOL_MAX: Final = 5
_SCALARS: Final[frozenset[type]] = frozenset({str, int, float, complex, bool, bytes, type(None)})

_U2: Final = struct.Struct("<H").unpack_from
_U4: Final = struct.Struct("<I").unpack_from
_I4: Final = struct.Struct("<i").unpack_from
_U8: Final = struct.Struct("<Q").unpack_from
_F8: Final = struct.Struct(">d").unpack_from


class RefusedPickle(ValueError):
    """A pickle that is truncated, or does what no checkpoint's pickle does."""


@dataclass(frozen=True)
class Maker:
    """What a name in a pickle stands for. The pickle can use the name in no other way.

    `new` creates an object without arguments, `call` one from the given arguments.
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
    """Return the value pickled in `chunks`, which are its bytes in pieces of any size.

    Args:
        chunks: read only as far as the pickle goes.
        find: returns what (module, name) stands for, usually a `Maker`; raises `RefusedPickle`.
        builds: by type, the function that sets an object's saved state in place.
        keys: types that may be dict keys besides scalars and flat tuples. Hashes must be cheap.
        persistent: returns what a persistent id stands for. Without it, such ids are refused.
        text_max: the maximum length of a text or bytes value, in bytes.

    Raises `RefusedPickle`, or any `Exception` that `find`, a `Maker` or a `Build` raises.
    """
    with pause_collection():
        return _Machine(chunks, find, builds, keys | _scalars(), persistent, text_max).run()


class _Machine:
    """The reader's stack, its memo, and a window of the bytes."""

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
        # A window has this many bytes beyond an opcode, unless the pickle ends there.
        self._text_max, self._margin = text_max, max(text_max, _NAME_BYTES_MAX) + 64
        self._keys, self._persistent = keys, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        # A dict, and not a list as in Python's unpickler: there, an index of 2^28 in nine bytes
        # allocates 4.4 GB.
        self._memo: dict[int, Any] = {}
        self._data, self._at, self._stop = b"", 0, 0
        self._room = _CONTAINERS_FREE
        self._is_over = False
        self._rare = {ord(code): getattr(self, name) for code, name in _RARE.items()}
        for code, value in _CONSTANTS.items():
            self._rare[ord(code)] = partial(self._stack.append, value)
        for code, kind in _COLLECTIONS.items():
            self._rare[ord(code)] = partial(self._make, kind)

    def run(self) -> Any:
        """Run the opcodes to the end. Frequent opcodes are handled here, the others in `_rare`."""
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
                        raise RefusedPickle(f"opcode {code:#04x}, which no checkpoint uses")
                    self._at = at
                    act()
                    at = self._at
                    if self._is_over:
                        break
            self._at = at
        if len(stack) != 1:
            raise RefusedPickle(f"it ends with {len(stack)} values, expected one")
        return stack[0]

    # --- bytes ----------------------------------------------------------------------------

    def _refill(self) -> None:
        """Move the window forward. Raises `RefusedPickle` if the pickle ended without STOP."""
        if len(self._stack) > _STACK_MAX or len(self._marks) > _STACK_MAX:
            raise RefusedPickle(f"more than {_STACK_MAX} unused values on the stack")
        pieces, size, is_last = [self._data[self._at :]], len(self._data) - self._at, False
        while size < _WINDOW + self._margin and not is_last:
            piece = next(self._chunks, b"")
            is_last = not piece
            pieces.append(piece)
            size += len(piece)
            # Collections are paid for with bytes that were read, so a small file cannot fill the
            # memory.
            self._room += len(piece) // _BYTES_PER_CONTAINER
        self._data, self._at = b"".join(pieces), 0
        self._stop = size if is_last else size - self._margin
        if not size:
            raise RefusedPickle("it ends early")

    def _take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        # Before the slice: the length comes from the file.
        if count > self._text_max:
            raise RefusedPickle(f"a value of {count} bytes, expected at most {self._text_max}")
        begin, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise RefusedPickle("it ends early")
        return self._data[begin : self._at]

    def _number(self, unpack: Callable[..., tuple[Any, ...]], size: int) -> Any:
        return unpack(self._take(size))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + _NAME_BYTES_MAX)
        if end < 0:
            raise RefusedPickle(f"a name of more than {_NAME_BYTES_MAX} bytes")
        return self._take(end + 1 - self._at)[:-1].decode()

    def _proto(self) -> None:
        if self._take(1)[0] > _PROTOCOL_MAX:
            raise RefusedPickle("an unknown protocol")

    def _frame(self) -> None:
        self._take(8)

    def _end(self) -> None:
        self._is_over = True

    # --- values ---------------------------------------------------------------------------

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
            raise RefusedPickle("a name that is not a string")
        self._stack.append(self._find(module, name))

    def _global(self) -> None:
        module = self._line()
        self._stack.append(self._find(module, self._line()))

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise RefusedPickle("a reference to an object outside the pickle")
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
        """Push a collection. Refuse it if there are too many for the bytes that were read."""
        self._room -= 1
        if self._room < 0:
            raise RefusedPickle("more collections than a checkpoint of its size has")
        self._stack.append(empty)

    def _make(self, kind: Callable[[], Any]) -> None:
        self._contain(kind())

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
        """Return the top of the stack, which must have exactly one of these types."""
        if type(self._stack[-1]) not in types:
            raise RefusedPickle(f"items for a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _checked_keys(self, keys: Any) -> Any:
        """Return `keys` after checking that each is cheap to hash."""
        if not self._keys.issuperset(map(type, keys)):
            for key in keys:
                # Hashing a tuple that contains itself twice, sixty levels deep, takes for ever, see
                # decision 28.
                if type(key) not in self._keys and not is_cheap(key):
                    raise RefusedPickle(f"a key of type {type(key).__name__}")
        return keys

    # --- objects --------------------------------------------------------------------------

    def _new_object(self) -> None:
        arguments, maker = self._stack.pop(), self._stack.pop()
        if type(maker) is not Maker or maker.new is None or arguments != ():
            raise RefusedPickle("an object of a class that is not allowed")
        self._contain(maker.new())

    def _reduce(self) -> None:
        arguments, maker = self._stack.pop(), self._stack.pop()
        if type(maker) is not Maker or maker.call is None or type(arguments) is not tuple:
            raise RefusedPickle("a call of a function that is not allowed")
        self._stack.append(maker.call(*arguments))

    def _build(self) -> None:
        state = self._stack.pop()
        # By exact type, and only for types that the caller names: attributes of a class let a file
        # escape its folder, see decision 28.
        build = self._builds.get(type(self._stack[-1]))
        if build is None:
            raise RefusedPickle(f"attributes for a {type(self._stack[-1]).__name__}")
        # Change the object in place, because the memo already has it.
        build(self._stack[-1], state)


def _scalars(*tuples: str) -> frozenset[type]:
    """Return the types that are cheap to hash, with those of torch that are named in `tuples`.

    Without torch, a pickle has no values of its types. The import would take seconds.
    """
    torch = sys.modules.get("torch")
    names = ("dtype", "layout", *tuples) if torch else ()
    return _SCALARS.union(getattr(torch, name) for name in names)


def is_cheap(key: Any) -> bool:
    """Return True for a key that is cheap to hash: a scalar, or a short tuple of scalars."""
    if type(key) in _SCALARS:
        return True
    scalars, kind = _scalars(), type(key)
    is_tuple = kind is tuple or kind in _scalars("Size") - scalars
    return kind in scalars or (
        is_tuple and len(key) <= _KEY_ITEMS_MAX and all(type(part) in scalars for part in key)
    )


_CONSTANTS: Final[dict[str, Any]] = {"N": None, "\x88": True, "\x89": False, ")": ()}
_COLLECTIONS: Final[dict[str, Callable[[], Any]]] = {"]": list, "}": dict, "\x8f": set}
_RARE: Final = {
    "\x80": "_proto",
    "\x95": "_frame",
    ".": "_end",
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
