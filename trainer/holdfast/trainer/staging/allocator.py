"""Threads of the flusher that allocate the memory of new staging slots while training begins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Final

from holdfast.trainer.slots.slots import Slot

# Clearing pages keeps a core fully busy, and training needs the cores.
THREADS_MAX: Final = 4


class Allocator:
    """One thread per rank's slots. At most `THREADS_MAX` of them work at once."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(THREADS_MAX)
        self._is_over = threading.Event()

    def begin(self, slots: Sequence[Slot], data_bytes: int) -> None:
        """Allocate `data_bytes` of each slot in order, in a thread. Returns at once.

        The thread stops early if a slot is truncated or closed meanwhile.
        """
        threading.Thread(
            target=self._allocate, args=(slots, data_bytes), name="allocate", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop all allocation."""
        self._is_over.set()

    def _allocate(self, slots: Sequence[Slot], data_bytes: int) -> None:
        with self._room:
            for slot in slots:
                if self._is_over.is_set():
                    return
                # A slot that was closed meanwhile needs no memory.
                with contextlib.suppress(ValueError):
                    slot.allocate(data_bytes, is_over=self._is_over.is_set)
