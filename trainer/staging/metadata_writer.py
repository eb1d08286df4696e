"""A thread that writes `.metadata` into the slots: it takes time, and only a commit needs it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from holdfast.contracts.slots import Slot
from holdfast.trainer.planning.layout import LateContent


class BackgroundMetadataWriter:
    """Writes one content at one offset of every slot, the slot of the first save first."""

    def __init__(self, slots: Sequence[Slot], at: int, content: LateContent) -> None:
        self._slots, self._at, self._content = slots, at, content
        self._is_closed = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-late", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True once all is written, or there is a problem."""
        return not self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """Why it could not be written."""
        return self._problem

    def wait(self) -> str | None:
        """Wait until all is written; the problem, if there was one.

        Bounded by the work: the thread waits for nobody, and ends by an error at the latest.
        """
        self._thread.join()
        return self._problem

    def close(self) -> None:
        """Leave off; the slots are of no more use unless it was done."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            # Nobody waits here: it is raised where all ranks meet for the first save.
            self._problem = (
                f".metadata could not be made beside training: {type(error).__name__}: {error}; "
                "where memory was short, use more nodes or ask the scheduler for more. The next "
                "prepare(state) tries again"
            )

    def _write(self) -> None:
        end = self._at + self._content.bytes
        first, *others = self._slots
        self._content.write_to(first.data[self._at : end], self._is_closed.is_set)
        for slot in others:
            if not self._is_closed.is_set():
                # By numpy, which lets the interpreter go while it copies.
                written = np.frombuffer(first.data[self._at : end], dtype=np.uint8)
                np.frombuffer(slot.data[self._at : end], dtype=np.uint8)[:] = written
