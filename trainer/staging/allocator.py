"""Putting memory behind new staging slots, by threads of the flusher, while training begins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Final

from holdfast.contracts.slots import Slot

# Clearing pages takes a core's whole speed, and the cores belong to training.
THREADS_MAX: Final = 4


class Allocator:
    """One thread for each rank's slots, `THREADS_MAX` of them at work at once."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(THREADS_MAX)
        self._is_over = threading.Event()

    def begin(self, slots: Sequence[Slot], data_bytes: int) -> None:
        """Allocate `data_bytes` of each, the first before the second; returns at once.

        A slot that is cut short or let go meanwhile ends its own part.
        """
        threading.Thread(
            target=self._allocate, args=(slots, data_bytes), name="allocate", daemon=True
        ).start()

    def stop(self) -> None:
        """Allocate no more."""
        self._is_over.set()

    def _allocate(self, slots: Sequence[Slot], data_bytes: int) -> None:
        with self._room:
            for slot in slots:
                if self._is_over.is_set():
                    return
                # A slot that was closed meanwhile needs no memory.
                with contextlib.suppress(ValueError):
                    slot.allocate(data_bytes, is_over=self._is_over.is_set)
