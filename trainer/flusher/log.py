"""The flusher's log, which is its standard error."""

from __future__ import annotations

import sys


def log(text: str) -> None:
    """Write a line to the log."""
    print(f"holdfast flusher: {text}", file=sys.stderr, flush=True)
