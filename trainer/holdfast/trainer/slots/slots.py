"""Staging slots: files in memory with the exact bytes of a rank's checkpoint files.

With `checkpoint.staging = "disk"`, they are files on a disk of the node instead: see `ImageFile`.

A slot outlives the rank that fills it, because the flusher and the agent hold its descriptor. The
head contains the slot's state. A JSON table lists which bytes belong to which file. A sealed slot
contains a complete step of its rank. If the rank dies before the seal, the bytes are useless.

The flusher writes a sealed slot to storage. A *snapshot* is just as complete but stays in memory: a
later step may overwrite it, and it is written only if the ranks die.

Memory ordering: the state says who may use the bytes. So a process completes its own loads and
stores of them before it stores a state, and begins them after it has loaded one, by a fence
(`contracts.memory_order`). Copies by other threads and by devices end before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.node.rank_status import fence

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
_libc.pwrite.restype = ctypes.c_ssize_t
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_uint]
_libc.sync_file_range.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int

# Images that are files on a disk of the node.
#
# Such a file never has a name, so nothing is left after a kill and another user can neither plant
# it nor open it. Its blocks are reserved at once, so a full disk is an error here and not while
# bytes are copied. Bytes are written by system calls: a mapping would first read each page that the
# system has dropped. What was written is sent to the disk early, so only a few of its pages are
# dirty, and the system can drop the others when memory is short.

# How many bytes are written before the disk begins with them. At most twice as many are dirty.
WINDOW_BYTES: Final = 16 * 1024 * 1024
WRITE_BYTES: Final = 8 * 1024 * 1024
# As for checkpoints: journals, logs and manifests may need space on the same disk.
MARGIN_BYTES_MAX: Final = 64 * 1024 * 1024
MODE: Final = 0o600
# Without a file system's support for files without names.
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
_WAIT_BEFORE: Final = 1
_WRITE: Final = 2
_WAIT_AFTER: Final = 4


def create_file(directory: Path, size: int) -> int:
    """Return the descriptor of a new file without a name, with `size` bytes on the disk.

    Raises `OSError`, with ENOSPC if the disk has not enough free space.
    """
    facts = os.statvfs(directory)
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    margin = min(MARGIN_BYTES_MAX, total // 100)
    if size + margin > free:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: an image needs {size} bytes and a reserve of {margin} "
            f"bytes, but {free} bytes are free",
        )
    handle = _create_nameless(directory)
    try:
        os.posix_fallocate(handle, 0, size)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _create_nameless(directory: Path) -> int:
    flags = os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(directory, os.O_TMPFILE | flags, MODE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = f".holdfast-slot-{secrets.token_hex(16)}"
        handle = os.open(name, os.O_CREAT | os.O_NOFOLLOW | flags, MODE, dir_fd=folder)
        # The file system may have removed it, but it is ours.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return handle
    finally:
        os.close(folder)


class ImageFile:
    """The file of an image. Several threads may write."""

    def __init__(self, handle: int, address: int) -> None:
        """`address` is that of the file's mapping. The descriptor is duplicated."""
        self._handle, self._address = os.dup(handle), address
        self._lock = threading.Lock()
        self._written: list[tuple[int, int]] = []
        self._started: list[tuple[int, int]] = []
        self._bytes = 0

    def move(self, to: int, source: int, size: int) -> None:
        """Write `size` bytes at the address `source` to where the address `to` is mapped.

        Raises `OSError`.
        """
        at, end = to - self._address, to - self._address + size
        while at < end:
            done = _libc.pwrite(self._handle, source + size - (end - at), end - at, at)
            if done <= 0:
                self._raise(ctypes.get_errno() if done < 0 else errno.EIO)
            self._note(at, at + done)
            at += max(done, 0)

    def put(self, at: int, content: memoryview) -> None:
        """Write bytes at an offset of the file. Raises `OSError`."""
        done = 0
        while done < len(content):
            piece = content[done : done + WRITE_BYTES]
            count = os.pwrite(self._handle, piece, at + done)
            if not count:
                self._raise(errno.EIO)
            self._note(at + done, at + done + count)
            done += count

    def close(self) -> None:
        """Close the descriptor. The file remains as long as another process has one."""
        os.close(self._handle)

    def _note(self, start: int, stop: int) -> None:
        """Send what was written to the disk, and wait for what was sent before.

        The other threads wait meanwhile, so they cannot write more than the window.
        """
        with self._lock:
            self._written.append((start, stop))
            self._bytes += stop - start
            if self._bytes < WINDOW_BYTES:
                return
            started, self._started = self._started, self._written
            self._written, self._bytes = [], 0
            for first, last in self._started:
                self._sync(first, last, _WRITE)
            for first, last in started:
                self._sync(first, last, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)

    def _sync(self, start: int, stop: int, flags: int) -> None:
        if _libc.sync_file_range(self._handle, start, stop - start, flags) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.ESPIPE, errno.EINVAL):
            self._raise(number)
        os.fdatasync(self._handle)

    def _raise(self, number: int) -> None:
        raise OSError(number, f"{os.strerror(number)}: the image on the node's disk")


# Allocation of memory pages ahead of their first use.
#
# The first access to a page costs a page fault, and the kernel must clear a new page. Both
# together take many times as long as the copy itself. The system calls here do this work in
# advance, in pieces and without the GIL, so that a background thread can do it during training.

# The kernel locks the address space during each call, and training also maps memory.
PIECE_BYTES: Final = 16 * 1024 * 1024
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; mmap does not name it


def populate(mapping: mmap.mmap, start: int, stop: int) -> Iterator[int]:
    """Allocate bytes `start` to `stop` of a writable mapping, without changing their contents.

    Yields the offset reached after each piece. Asks for huge pages and accepts small ones. Ends
    early, without an error, if the kernel refuses: memory is short, the file was truncated, or the
    kernel does not support the call.
    """
    held = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(held)
    try:
        first = start - start % mmap.PAGESIZE
        _libc.madvise(address + first, stop - first, mmap.MADV_HUGEPAGE)
        for at in range(first, stop, PIECE_BYTES):
            size = min(PIECE_BYTES, stop - at)
            if _libc.madvise(address + at, size, MADV_POPULATE_WRITE) != 0:
                return
            yield at + size
    finally:
        # While this reference exists, the mapping cannot be closed.
        del held


MAGIC: Final = 0x4846534C_00000001
WORD_BYTES: Final = 8
HEAD_BYTES: Final = 4096
TABLE_BYTES: Final = 1 << 20
DATA_OFFSET: Final = HEAD_BYTES + TABLE_BYTES
ERROR_BYTES_MAX: Final = 2048
SLOTS_PER_RANK: Final = 2
NO_MORE: Final = -1


class SlotState(IntEnum):
    """The state of a slot: EMPTY → COPYING → SEALED → FLUSHING → DONE or FAILED → COPYING …

    For snapshots: COPYING → SNAPSHOT → COPYING …, and SNAPSHOT → FLUSHING once no rank is left.
    """

    EMPTY = 0
    COPYING = 1
    SEALED = 2
    FLUSHING = 3
    DONE = 4
    FAILED = 5
    SNAPSHOT = 6


# In these states the flusher does not read the slot, so its rank may fill it.
FREE_STATES: Final = frozenset(
    {SlotState.EMPTY, SlotState.DONE, SlotState.FAILED, SlotState.SNAPSHOT}
)


class _Word(IntEnum):
    MAGIC = 0
    STATE = 1
    STEP = 2
    TABLE_BYTES = 3
    ERROR_BYTES = 4
    ALLOCATED_BYTES = 5
    ON_DISK = 6


_ERROR_AT = 1024


class Slot:
    """A mapped staging slot. `data` has the files' bytes at the offsets in the table, writable."""

    def __init__(self, handle: int) -> None:
        self._map = mmap.mmap(handle, 0)
        self._words = memoryview(self._map)[:HEAD_BYTES].cast("q")
        self.data = memoryview(self._map)[DATA_OFFSET:]
        if self._words[_Word.MAGIC] not in (0, MAGIC):
            raise ValueError("not a staging slot of this version of Holdfast")
        self._words[_Word.MAGIC] = MAGIC
        self._file: ImageFile | None = None
        if self._words[_Word.ON_DISK]:
            self._file = ImageFile(handle, ctypes.addressof(ctypes.c_char.from_buffer(self._map)))

    @staticmethod
    def create(data_bytes: int, directory: str = "") -> int:
        """Return the descriptor of a new, empty slot with space for `data_bytes` of files.

        With a `directory`, it is on that disk. Raises `OSError` if the disk is full.
        """
        size = DATA_OFFSET + max(data_bytes, mmap.PAGESIZE)
        if directory:
            handle = create_file(Path(directory), size)
            # The pages of a file are not allocated ahead: they would be memory.
            words = struct.pack("=qq", NO_MORE, 1)
            os.pwrite(handle, words, _Word.ALLOCATED_BYTES * WORD_BYTES)
            return handle
        handle = os.memfd_create("holdfast-slot", os.MFD_CLOEXEC)
        os.ftruncate(handle, size)
        return handle

    @property
    def is_on_disk(self) -> bool:
        """True for a file on the node's disk."""
        return self._file is not None

    @property
    def move(self) -> Callable[[int, int, int], None] | None:
        """How to copy bytes into the data, as `ImageFile.move`; None for a slot in memory."""
        return None if self._file is None else self._file.move

    def put(self, at: int, content: memoryview) -> None:
        """Write bytes at an offset of the data. Raises `OSError` if a disk fails."""
        if self._file is None:
            self.data[at : at + len(content)] = content
        else:
            self._file.put(DATA_OFFSET + at, content)

    @property
    def state(self) -> SlotState:
        value = SlotState(self._words[_Word.STATE])
        fence()
        return value

    @state.setter
    def state(self, value: SlotState) -> None:
        fence()
        self._words[_Word.STATE] = value

    @property
    def step(self) -> int:
        return self._words[_Word.STEP]

    @property
    def allocated_bytes(self) -> int:
        """Bytes from the start of the file that have memory; `NO_MORE` if allocation failed."""
        return self._words[_Word.ALLOCATED_BYTES]

    @property
    def table(self) -> dict[str, Any]:
        """The JSON table: facts of the step, and `files`: [{path, offset, bytes}]."""
        size = self._words[_Word.TABLE_BYTES]
        parsed: dict[str, Any] = json.loads(self._map[HEAD_BYTES : HEAD_BYTES + size])
        return parsed

    @property
    def mark(self) -> tuple[SlotState, int, bytes]:
        """The state, the step and the table. If it stays the same, so have the bytes of the step.

        A rank changes the state before the bytes, and the table has the time of the copy.
        """
        state, size = self.state, self._words[_Word.TABLE_BYTES]
        return state, self.step, bytes(self._map[HEAD_BYTES : HEAD_BYTES + size])

    @property
    def error(self) -> str:
        """Why the flush failed, if the state is FAILED."""
        size = self._words[_Word.ERROR_BYTES]
        return self._map[_ERROR_AT : _ERROR_AT + size].decode(errors="replace")

    def begin(self, step: int) -> None:
        """Start to fill the slot with `step`. Until `seal`, its bytes are not valid."""
        self.state = SlotState.COPYING
        # No byte of the new step before the state, or salvage could believe a mixture.
        fence()
        self._words[_Word.STEP] = step

    def seal(self, table: dict[str, Any], *, is_snapshot: bool = False) -> None:
        """Mark the bytes as complete. The flusher then writes them, unless it is a snapshot.

        Raises `ValueError` if the table is too long.
        """
        content = json.dumps(table).encode()
        if len(content) > TABLE_BYTES:
            raise ValueError(
                f"a slot table of {len(content)} bytes: expected at most {TABLE_BYTES}"
            )
        self._map[HEAD_BYTES : HEAD_BYTES + len(content)] = content
        self._words[_Word.TABLE_BYTES] = len(content)
        self.state = SlotState.SNAPSHOT if is_snapshot else SlotState.SEALED

    def fail(self, reason: str) -> None:
        """Record that the step in this slot did not become durable, and why."""
        content = reason.encode(errors="backslashreplace")[:ERROR_BYTES_MAX]
        self._map[_ERROR_AT : _ERROR_AT + len(content)] = content
        self._words[_Word.ERROR_BYTES] = len(content)
        self.state = SlotState.FAILED

    def allocate(self, data_bytes: int, *, is_over: Callable[[], bool]) -> None:
        """Allocate memory for the first `data_bytes` of the data, in pieces.

        This takes a while, but it releases the GIL. It stops early if `is_over()`, or if the system
        has no more memory. The rest is then allocated at the first copy.
        """
        if self.is_on_disk:
            return
        stop, reached = min(DATA_OFFSET + data_bytes, len(self._map)), 0
        for reached in populate(self._map, 0, stop):
            self._words[_Word.ALLOCATED_BYTES] = reached
            if is_over():
                break
        if reached < stop:
            self._words[_Word.ALLOCATED_BYTES] = NO_MORE

    def map_pages(self, start: int, stop: int) -> None:
        """Map bytes `start` to `stop`, allocated by another process, into our page tables."""
        for _ in () if self.is_on_disk else populate(self._map, start, stop):
            pass

    def close(self) -> None:
        """Unmap the slot from this process. All views of its data must be released before."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._words.release()
        self.data.release()
        self._map.close()


def choose_slot(slots: Sequence[Slot]) -> int | None:
    """Return the slot to fill next: an unused one, else the oldest snapshot, else None."""
    seen = [(i, slot.state, slot.step) for i, slot in enumerate(slots)]
    usable = [(i, state, step) for i, state, step in seen if state in FREE_STATES]
    free = [(state is SlotState.SNAPSHOT, step, i) for i, state, step in usable]
    return min(free)[2] if free else None
