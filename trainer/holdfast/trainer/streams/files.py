"""Files of shards, local or at a URL that fsspec can read in part."""

from __future__ import annotations

import os
from typing import IO, Any, Final

from holdfast.contracts.errors import SpecError

# Shards are checked for this long before the first step. One that was not checked then is checked
# when it is read.
CHECK_S: Final = 1.0


def size_of(path: str) -> int:
    """Return the size of a file. Raises `OSError` if it is missing."""
    if "://" not in path:
        return os.stat(path).st_size
    system, inner = _remote(path)
    size = system.size(inner)
    if size is None:
        raise SpecError(
            f"{path}: its server does not name a size, so it cannot be read in part; expected a "
            "store that can, or a local copy"
        )
    return int(size)


def open_file(path: str) -> IO[bytes]:
    """Open a file that can seek."""
    if "://" not in path:
        return open(path, "rb")
    system, inner = _remote(path)
    file: IO[bytes] = system.open(inner, "rb")
    return file


def open_shard(path: str, size: int) -> IO[bytes]:
    """Open a file that had `size` bytes when the launch began. Raises `SpecError` if it changed."""
    restore = "restore it, and the run continues from its last checkpoint"
    try:
        file = open_file(path)
    except FileNotFoundError as error:
        raise SpecError(
            f"the shard {path} was deleted since the launch began; {restore}"
        ) from error
    found = file.seek(0, os.SEEK_END)
    if found != size:
        file.close()
        raise SpecError(
            f"the shard {path} has {found} bytes, and had {size} when the launch began; {restore}"
        )
    file.seek(0)
    return file


def _remote(path: str) -> tuple[Any, str]:
    # Not at the top, because local shards do not need it.
    from fsspec.core import url_to_fs

    # A worker that was forked gets a client of its own.
    system, inner = url_to_fs(path)
    return system, inner
