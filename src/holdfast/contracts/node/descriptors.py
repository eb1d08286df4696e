"""The limit of open files of a process."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to the highest that it may set (best effort)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
