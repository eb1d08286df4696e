"""Reading small files that a stranger may have made: nothing that never ends, nothing huge."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_bounded(path: Path | str, bytes_max: int) -> bytes:
    """The bytes of a regular file of at most `bytes_max` bytes.

    Raises `OSError` as `open` and `read` do, and `ValueError` for a pipe or device, which might
    never end, for a directory, and for a longer file.
    """
    # Without O_NONBLOCK the opening of a pipe waits for a writer that may never come.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > bytes_max:
            raise ValueError(f"{found.st_size} bytes, expected {bytes_max} or less")
        with open(handle, "rb", closefd=False) as stream:
            return stream.read(found.st_size)
    finally:
        os.close(handle)
