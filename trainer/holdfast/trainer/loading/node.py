"""The ranks of one node that read together, and the memory that all of them can access.

Each rank creates a window: a memory file that the others open through `/proc`. Data that several
ranks need is read into the reader's window, and the others copy it from there. A window has two
halves, so that one is filled while the other is copied from.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.trainer.loading.plan import PIECE_BYTES
from holdfast.trainer.ranks.rank_tree import RankTree

# Values with large arrays that one process of a node makes and its peers read in shared memory.
#
# Arrays are not copied by the readers, so a node holds them once.

_ALIGNMENT: Final = 64
# The sizes of the pickled value and of the list of its arrays' places, at the start of the memory.
_HEAD: Final = struct.Struct("<qq")


@contextlib.contextmanager
def published(value: Any) -> Iterator[str]:
    """Copy `value` into shared memory. Peers of the same user call `mapped` with the path given.

    The path is valid until the block ends. Values that are mapped stay valid.
    """
    buffers: list[pickle.PickleBuffer] = []
    main = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(arrays)}q", *(array.nbytes for array in arrays))
    parts = [memoryview(_HEAD.pack(len(main), len(sizes)) + main + sizes), *arrays]
    handle = os.memfd_create("holdfast-node-table", os.MFD_CLOEXEC)
    try:
        os.ftruncate(handle, sum(map(_aligned, (part.nbytes for part in parts))))
        at = 0
        with mmap.mmap(handle, 0) as memory, memoryview(memory) as view:
            for part in parts:
                view[at : at + part.nbytes] = part
                at += _aligned(part.nbytes)
        yield f"/proc/{os.getpid()}/fd/{handle}"
    finally:
        os.close(handle)


def mapped(path: str) -> Any:
    """Return the value that a peer published at `path`. Its arrays are in the shared memory.

    The arrays are read-only. Raises `OSError` if the memory cannot be opened, for example because
    the peer is in another container.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        view = memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(handle)
    main_bytes, sizes_bytes = _HEAD.unpack_from(view)
    begin = _HEAD.size + main_bytes
    sizes = struct.unpack_from(f"<{sizes_bytes // 8}q", view, begin)
    arrays, at = [], _aligned(begin + sizes_bytes)
    for size in sizes:
        arrays.append(view[at : at + size])
        at += _aligned(size)
    # The memory is of a peer of the same job, whose messages are pickles too.
    return pickle.loads(view[_HEAD.size : begin], buffers=arrays)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


WINDOW_BYTES_MAX: Final = 256 * 1024 * 1024
SLOTS_MAX: Final = 8
HALVES: Final = 2
Home = tuple[str, str, str]


@dataclass(frozen=True)
class Address:
    """The host of a rank, and the path of its window on that host."""

    home: Home
    place: str


@contextlib.contextmanager
def own_window() -> Iterator[Address]:
    """Create this rank's memory file. Others may open it at its address until the block ends."""
    handle = os.memfd_create("holdfast-window", os.MFD_CLOEXEC)
    try:
        os.ftruncate(handle, HALVES * SLOTS_MAX * PIECE_BYTES)
        yield Address(find_home(), f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)


class ReadingNode:
    """The ranks that read together. This rank is number `rank` of `size`.

    They communicate over `tree`, which connects only them. Half of a window has `slots` pieces.
    `is_sharing` is False if some windows cannot be opened: ranks in separate containers cannot open
    each other's.
    """

    def __init__(self, places: Sequence[str], tree: RankTree) -> None:
        self._tree = tree
        self.rank, self.size = tree.index, len(places)
        each = WINDOW_BYTES_MAX // (HALVES * PIECE_BYTES * self.size)
        self.slots = max(1, min(SLOTS_MAX, each))
        self._maps = _map_all(places, HALVES * self.slots * PIECE_BYTES)
        self.is_sharing = len(self._maps) == self.size

    @classmethod
    @contextlib.contextmanager
    def joined(cls, tree: RankTree, addresses: Sequence[Address]) -> Iterator[ReadingNode]:
        """Return the ranks of `tree` on this rank's host. All its ranks call this together."""
        own = addresses[tree.index].home
        here = [rank for rank, one in enumerate(addresses) if one.home == own]
        places = [addresses[rank].place for rank in here]
        among = tree if len(here) == tree.size else tree.split(here[0])
        assert among is not None
        try:
            yield cls(places, among)
        finally:
            if among is not tree:
                among.close()

    def gather(self, value: Any) -> list[Any]:
        return self._tree.gather_all(value)

    def barrier(self) -> None:
        """Return when all ranks of the node have called this."""
        self._tree.gather_all(None)

    def slot(self, rank: int, half: int, slot: int) -> memoryview:
        """Return the memory of one piece in the window of `rank`."""
        start = (half * self.slots + slot) * PIECE_BYTES
        return memoryview(self._maps[rank])[start : start + PIECE_BYTES]


def _map_all(places: Sequence[str], size: int) -> list[mmap.mmap]:
    """Map the memory files at `places`, up to the first that cannot be opened."""
    maps: list[mmap.mmap] = []
    for place in places:
        try:
            handle = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            break
        try:
            maps.append(mmap.mmap(handle, size))
        finally:
            os.close(handle)
    return maps


def find_home() -> Home:
    """Return an id that is equal only for processes that share `/proc`."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return boot, socket.gethostname(), os.readlink("/proc/self/ns/pid")
