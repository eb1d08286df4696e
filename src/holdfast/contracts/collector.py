"""Python's garbage collector, told what it need not look at."""

from __future__ import annotations

import gc


def settle_memory() -> None:
    """Have the collector pass over what is there now, which stays until the process ends.

    For a program that has imported what it needs and begins its work. A full pass looks at every
    object of every module: a tenth of a second, in the midst of some answer, again and again.
    """
    gc.collect()
    gc.freeze()
