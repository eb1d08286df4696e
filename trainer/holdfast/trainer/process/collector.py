"""A pause of Python's garbage collector, for code that creates many objects that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Pause the garbage collector while the block creates many objects that stay.

    Each pass would scan all objects of the process and free none of them. That takes half of the
    time for reading a large file. If the collector was off before, it stays off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # With several threads, the one that found the collector on turns it on again.
        if was_on:
            gc.enable()
