"""Lines that Holdfast adds to the output of a job, which may be on a full disk."""

from __future__ import annotations

import contextlib
import sys


def report(text: str, *, is_error: bool = False) -> None:
    """Print a line to standard output, or to standard error if `is_error`.

    A full disk may refuse the line. It is lost then, or printed later, and the caller continues.
    """
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr if is_error else sys.stdout, flush=True)
