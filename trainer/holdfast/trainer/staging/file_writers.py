"""Functions that write a file of a checkpoint, and the places that they write to.

A framework's files are pickles of a length that only writing them shows. They go straight into a
staging slot, without a copy in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol, cast

import torch

from holdfast.trainer.slots.slots import Slot


class SlotFile(Protocol):
    """The part of a binary file that `torch.save` and other writers need."""

    def write(self, content: bytes | memoryview, /) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...


Writer = Callable[[SlotFile], object]
"""Writes the content of one file. It may be called again, and then writes the same content."""


def bytes_writer(content: bytes) -> Writer:
    """Return the writer of a file with this content."""
    return lambda output: output.write(content)


def torch_writer(value: Any, *, as_zip: bool = True) -> Writer:
    """Return the writer of a file that `torch.load` reads. `as_zip=False` means torch's old format.

    The zip has no CRC32, because the manifest has a checksum of the file.
    """

    def write(output: SlotFile) -> None:
        with _without_crc():
            # It needs only the methods of `SlotFile`.
            file = cast(IO[bytes], output)
            torch.save(value, file, _use_new_zipfile_serialization=as_zip)

    return write


class SlotOutput:
    """A file in a slot, from `start` on. Bytes beyond `room_bytes` only count.

    An error here would leave torch's zip writer in the middle of a file. So `problem` keeps one,
    and the bytes after it only count.
    """

    def __init__(self, slot: Slot, start: int, room_bytes: int) -> None:
        self._slot, self._room_bytes = slot, room_bytes
        self._start, self._at = start, start
        self.problem: OSError | None = None

    def write(self, content: bytes | memoryview, /) -> int:
        """Append `content`."""
        with memoryview(content).cast("B") as piece:
            size = len(piece)
            end = self._at + size
            if end <= self._room_bytes and self.problem is None:
                try:
                    self._slot.put(self._at, piece)
                except OSError as error:
                    self.problem = error
        self._at = end
        return size

    def tell(self) -> int:
        return self._at - self._start

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


class _Counter:
    """A file that only counts the bytes written to it."""

    def __init__(self) -> None:
        self._bytes = 0

    def write(self, content: bytes | memoryview, /) -> int:
        size = memoryview(content).nbytes
        self._bytes += size
        return size

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


def measure(write: Writer) -> int:
    """Return the bytes of a file."""
    counter = _Counter()
    write(counter)
    return counter.tell()


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
