"""The id of a root, because two clusters may have roots with the same path."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import durable, reading
from holdfast.contracts.disk.paths import ROOT_ID
from holdfast.contracts.errors import ForeignFileError

BYTES_MAX: Final = 64
MODE: Final = 0o644
_ID: Final = re.compile(rb"[0-9a-f]{32}\n?")


def read_root_id(root: Path) -> str:
    """Return the UUID of `root`, 32 hexadecimal digits; empty if it has none that can be read."""
    try:
        content = reading.read_bounded(root / ROOT_ID, BYTES_MAX)
    except (OSError, ForeignFileError):
        return ""
    return content.decode().strip() if _ID.fullmatch(content) else ""


def ensure_root_id(root: Path) -> str:
    """Return the UUID of `root`, and create it durably if there is none.

    Everyone who can enter the root can read it, whatever the umask of the process that created it:
    two clusters that share an index could not be told apart otherwise. Returns an empty string if
    the file cannot be created, such as in another user's root.
    """
    place = root / ROOT_ID
    if not (found := read_root_id(root)):
        try:
            # Exclusive, and read afterwards: if two processes create it, both must use the same id.
            durable.create_bytes(place, f"{uuid.uuid4().hex}\n".encode())
        except OSError:
            return ""
        found = read_root_id(root)
    with contextlib.suppress(OSError):
        if place.lstat().st_mode & MODE != MODE:
            _open_to_all(place)
    return found


def _open_to_all(place: Path) -> None:
    """Let everyone read the file, if it is a regular file of this account."""
    handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            os.fchmod(handle, MODE)
    finally:
        os.close(handle)
