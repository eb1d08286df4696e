"""Garbage collection in commands that run for long."""

from __future__ import annotations

import gc


def return_free_memory() -> None:
    """Collect garbage, then exclude all present objects from later collections.

    Call this once a program has imported its modules. Otherwise each full pass scans every object
    of every module, which delays an answer by a tenth of a second.
    """
    gc.collect()
    gc.freeze()
