"""A thread that writes `.metadata` into the slots while training continues."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from holdfast.trainer.planning.layout import LateContent
from holdfast.trainer.slots.slots import Slot


class BackgroundMetadataWriter:
    """Writes one content at one offset of every slot, beginning with the slot of the first save."""

    def __init__(self, slots: Sequence[Slot], at: int, content: LateContent) -> None:
        self._slots, self._at, self._content = slots, at, content
        self._is_closed = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-late", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True once all is written or an error ended the thread."""
        return not self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """The error that ended the thread, or None."""
        return self._problem

    def wait(self) -> str | None:
        """Wait until all is written. Return the error, or None.

        The wait is bounded, because the thread waits for no other process.
        """
        self._thread.join()
        return self._problem

    def close(self) -> None:
        """Stop writing. Unless it was done, the slots can no longer be used."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            # No caller waits for this thread. The first save raises the error on all ranks.
            self._problem = (
                f".metadata could not be built in the background: {type(error).__name__}: {error}. "
                "If memory was short, use more nodes or request more memory per node. The next "
                "prepare(state) tries again"
            )

    def _write(self) -> None:
        end = self._at + self._content.bytes
        first, *others = self._slots
        self._content.write_to(first.data[self._at : end], self._is_closed.is_set)
        for slot in others:
            if not self._is_closed.is_set():
                # numpy releases the interpreter lock while it copies.
                written = np.frombuffer(first.data[self._at : end], dtype=np.uint8)
                np.frombuffer(slot.data[self._at : end], dtype=np.uint8)[:] = written
