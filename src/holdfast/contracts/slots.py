"""Staging slots: memory files that hold the exact bytes of a rank's checkpoint files.

A slot outlives the rank that fills it: the flusher and the agent hold its descriptor. The head
says what state it is in; a JSON table says which bytes are which file. A slot that was not
sealed when its rank died is worth nothing, a sealed one is a whole step of that rank.

A sealed slot is to be written. A *snapshot* is as complete but kept in memory alone: a later step
may overwrite it, and it is written only when the ranks have died.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final

from holdfast.contracts.memory import populate

MAGIC: Final = 0x4846534C_00000001
HEAD_BYTES: Final = 4096
TABLE_BYTES: Final = 1 << 20
DATA_OFFSET: Final = HEAD_BYTES + TABLE_BYTES
ERROR_BYTES_MAX: Final = 2048
SLOTS_PER_RANK: Final = 2
NO_MORE: Final = -1


class SlotState(IntEnum):
    """EMPTY → COPYING → SEALED → FLUSHING → DONE or FAILED → COPYING …

    Or COPYING → SNAPSHOT → COPYING …, and SNAPSHOT → FLUSHING once no rank is left.
    """

    EMPTY = 0
    COPYING = 1
    SEALED = 2
    FLUSHING = 3
    DONE = 4
    FAILED = 5
    SNAPSHOT = 6


# Nobody writes from a slot in one of these, so that its rank may fill it.
FREE_STATES: Final = frozenset(
    {SlotState.EMPTY, SlotState.DONE, SlotState.FAILED, SlotState.SNAPSHOT}
)


class _Word(IntEnum):
    MAGIC = 0
    STATE = 1
    STEP = 2
    TABLE_BYTES = 3
    ERROR_BYTES = 4
    ALLOCATED_BYTES = 5


_ERROR_AT = 1024


class Slot:
    """One staging slot, mapped. `data` is its writable bytes, file images at table offsets."""

    def __init__(self, handle: int) -> None:
        self._map = mmap.mmap(handle, 0)
        self._words = memoryview(self._map)[:HEAD_BYTES].cast("q")
        self.data = memoryview(self._map)[DATA_OFFSET:]
        if self._words[_Word.MAGIC] not in (0, MAGIC):
            raise ValueError("not a Holdfast staging slot, or one of another version")
        self._words[_Word.MAGIC] = MAGIC

    @staticmethod
    def create(data_bytes: int) -> int:
        """The descriptor of a new, empty slot with room for `data_bytes` of file images."""
        handle = os.memfd_create("holdfast-slot", os.MFD_CLOEXEC)
        os.ftruncate(handle, DATA_OFFSET + max(data_bytes, mmap.PAGESIZE))
        return handle

    @property
    def state(self) -> SlotState:
        return SlotState(self._words[_Word.STATE])

    @state.setter
    def state(self, value: SlotState) -> None:
        self._words[_Word.STATE] = value

    @property
    def step(self) -> int:
        return self._words[_Word.STEP]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the file, from its start, that have memory behind them; `NO_MORE` at the end
        of an allocation that stopped early."""
        return self._words[_Word.ALLOCATED_BYTES]

    @property
    def table(self) -> dict[str, Any]:
        """The JSON table: what the step is, and `files`: [{path, offset, bytes}]."""
        size = self._words[_Word.TABLE_BYTES]
        parsed: dict[str, Any] = json.loads(self._map[HEAD_BYTES : HEAD_BYTES + size])
        return parsed

    @property
    def error(self) -> str:
        """Why the flush failed, when the state is FAILED."""
        size = self._words[_Word.ERROR_BYTES]
        return self._map[_ERROR_AT : _ERROR_AT + size].decode(errors="replace")

    def begin(self, step: int) -> None:
        """Take the slot for `step`: until `seal` its bytes are worth nothing."""
        self._words[_Word.STATE] = SlotState.COPYING
        self._words[_Word.STEP] = step

    def seal(self, table: dict[str, Any], *, is_snapshot: bool = False) -> None:
        """Declare the bytes complete, to be written unless it is a snapshot.

        Raises `ValueError` when the table is too long.
        """
        content = json.dumps(table).encode()
        if len(content) > TABLE_BYTES:
            raise ValueError(
                f"a slot table of {len(content)} bytes: expected {TABLE_BYTES} or less"
            )
        self._map[HEAD_BYTES : HEAD_BYTES + len(content)] = content
        self._words[_Word.TABLE_BYTES] = len(content)
        state = SlotState.SNAPSHOT if is_snapshot else SlotState.SEALED
        self._words[_Word.STATE] = state

    def fail(self, reason: str) -> None:
        """Say that the step in this slot did not become durable, and why."""
        content = reason.encode()[:ERROR_BYTES_MAX]
        self._map[_ERROR_AT : _ERROR_AT + len(content)] = content
        self._words[_Word.ERROR_BYTES] = len(content)
        self._words[_Word.STATE] = SlotState.FAILED

    def allocate(self, data_bytes: int, *, is_over: Callable[[], bool]) -> None:
        """Put memory behind the first `data_bytes` of the data, piece by piece.

        Takes a while, and holds nobody up: the interpreter is free meanwhile. Stops early when
        `is_over()`, or where the system has no more memory: what is missing is then taken at the
        first copy, as it would have been without this.
        """
        stop, reached = min(DATA_OFFSET + data_bytes, len(self._map)), 0
        for reached in populate(self._map, 0, stop):
            self._words[_Word.ALLOCATED_BYTES] = reached
            if is_over():
                break
        if reached < stop:
            self._words[_Word.ALLOCATED_BYTES] = NO_MORE

    def map_pages(self, start: int, stop: int) -> None:
        """Enter bytes `start` to `stop` of the file, allocated by another, in our page tables."""
        for _ in populate(self._map, start, stop):
            pass

    def close(self) -> None:
        """Unmap the slot from this process; views handed out must be gone by then."""
        self._words.release()
        self.data.release()
        self._map.close()


def choose_slot(slots: Sequence[Slot]) -> int | None:
    """Which slot a rank fills next: one of no more use, else the older snapshot, else None."""
    seen = [(i, slot.state, slot.step) for i, slot in enumerate(slots)]
    usable = [(i, state, step) for i, state, step in seen if state in FREE_STATES]
    free = [(state is SlotState.SNAPSHOT, step, i) for i, state, step in usable]
    return min(free)[2] if free else None
