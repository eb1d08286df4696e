"""Python's garbage collector, told what it need not look at."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def return_free_memory() -> None:
    """Have the collector pass over what is there now, which stays until the process ends.

    For a program that has imported what it needs and begins its work. A full pass looks at every
    object of every module: a tenth of a second, in the midst of some answer, again and again.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Keep the collector from looking while many objects are made that stay.

    Each pass would look at all of them, and at all else in the process, and find nothing to free:
    half of the time that reading a large file takes. Where the collector is off, it stays off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Of several threads at once, the one that found it on turns it on: it is never left off.
        if was_on:
            gc.enable()
