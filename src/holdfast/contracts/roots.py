"""The id of a root, because two clusters may have roots with the same path."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Final

from holdfast.contracts.durable import create_bytes
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.paths import ROOT_ID
from holdfast.contracts.reading import read_bounded

BYTES_MAX: Final = 64
_ID: Final = re.compile(rb"[0-9a-f]{32}\n?")


def read_root_id(root: Path) -> str:
    """Return the UUID of `root`, 32 hexadecimal digits; empty if it has none that can be read."""
    try:
        content = read_bounded(root / ROOT_ID, BYTES_MAX)
    except (OSError, ForeignFileError):
        return ""
    return content.decode().strip() if _ID.fullmatch(content) else ""


def ensure_root_id(root: Path) -> str:
    """Return the UUID of `root`, and create it durably if there is none.

    Returns an empty string if the file cannot be created, such as in another user's root.
    """
    if found := read_root_id(root):
        return found
    try:
        create_bytes(root / ROOT_ID, f"{uuid.uuid4().hex}\n".encode())
    except OSError:
        return ""
    return read_root_id(root)
