"""Files of the program's framework, staged by a rank and written by the node's flusher.

They lie anywhere in the file system and belong to no checkpoint, such as those of Lightning's
`ModelCheckpoint`. A rank has as many slots for them as for steps, from its first file on. Their
memory is allocated when a file first fills it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.contracts.errors import SaveError
from holdfast.trainer.slots.slots import DATA_OFFSET, FREE_STATES, Slot, SlotState
from holdfast.trainer.staging.file_writers import SlotOutput, Writer, measure
from holdfast.trainer.staging.stage import FlusherConnection

POLL_S: Final = 0.01
# Space for a file that becomes a little longer from save to save.
GROWTH: Final = 1.02
GROWTH_BYTES: Final = 1 << 20


class ProgramFiles:
    """One rank's files that are staged, and those that are still being written.

    `beat` is called while this rank waits, for at most `timeout_s` seconds.
    """

    def __init__(
        self, connection: FlusherConnection, *, beat: Callable[[], object], timeout_s: float
    ) -> None:
        self._connection, self._beat, self._timeout_s = connection, beat, timeout_s
        self._slots: list[Slot] = []
        self._staged = 0

    def stage(self, path: Path, write: Writer) -> None:
        """Write the content of `path` to memory. The flusher then replaces the file durably.

        The file is there before any checkpoint that this rank stages later is committed. Raises
        `SaveError` if an earlier file could not be written, or if no slot comes free in time.
        """
        slot = self._take_free()
        size = measure(write) if slot is None else _fill(slot, write)
        if slot is None or size > len(slot.data):
            slot = self._replace_slots(size)
            _fill(slot, write)
        self._staged += 1
        slot.begin(self._staged)
        slot.seal({"path": str(path), "bytes": size})
        self._connection.notify("sealed")

    def wait(self, path: Path | None = None) -> None:
        """Wait until the file at `path`, or every file, is written.

        Raises `SaveError` if a file could not be written, or was not in time.
        """
        self._wait_until(lambda: not self._pending(path), f"{path or 'a staged file'}")
        self._raise_failure()

    def close(self) -> None:
        """Release the slots in this process. Staged files are written nevertheless."""
        for slot in self._slots:
            slot.close()
        self._slots = []

    def _pending(self, path: Path | None = None) -> list[Slot]:
        busy = [slot for slot in self._slots if slot.state not in FREE_STATES]
        return [slot for slot in busy if path is None or slot.table["path"] == str(path)]

    def _take_free(self) -> Slot | None:
        """Return a slot that is free, the first one again if possible. None without slots."""
        self._wait_until(
            lambda: len(self._pending()) < max(1, len(self._slots)), "one of the last staged files"
        )
        self._raise_failure()
        return next((slot for slot in self._slots if slot.state in FREE_STATES), None)

    def _replace_slots(self, size: int) -> Slot:
        """Get slots for files of `size` bytes, once all smaller ones are written."""
        self.wait()
        self.close()
        self._connection.release_slots(of_program=True)
        space = int(size * GROWTH) + GROWTH_BYTES
        self._slots = self._connection.request_file_slots(space)
        # One call for all pages takes a fraction of the time of a fault for each.
        self._slots[0].map_pages(0, DATA_OFFSET + size)
        return self._slots[0]

    def _raise_failure(self) -> None:
        for slot in self._slots:
            if slot.state is SlotState.FAILED:
                slot.state = SlotState.EMPTY
                raise SaveError(
                    f"{slot.table['path']} was not written: {slot.error}. Free space or fix the "
                    "storage, then run the same command"
                )

    def _wait_until(self, is_over: Callable[[], bool], awaited: str) -> None:
        give_up = time.monotonic() + self._timeout_s
        while not is_over():
            if time.monotonic() > give_up:
                raise SaveError(
                    f"{awaited} was not written within {self._timeout_s:.0f} s; the storage may be "
                    "hanging"
                )
            self._beat()
            time.sleep(POLL_S)


def _fill(slot: Slot, write: Writer) -> int:
    """Write a file into a slot, and return its length. A longer one than the slot is cut off."""
    output = SlotOutput(slot, 0, len(slot.data))
    write(output)
    if output.problem is not None:
        raise SaveError(f"a file cannot be staged: {output.problem.strerror}") from output.problem
    return output.tell()
