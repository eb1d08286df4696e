"""Values with large arrays that one process of a node makes and its peers read in shared memory.

Arrays are not copied by the readers, so a node holds them once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import struct
from collections.abc import Iterator
from typing import Any, Final

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
