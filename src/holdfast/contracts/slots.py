"""Staging slots: memory files that hold the exact bytes of a rank's checkpoint files.

A slot outlives the rank that fills it: the flusher and the agent hold its descriptor. The head
says what state it is in; a JSON table says which bytes are which file. A slot that was not
sealed when its rank died is worth nothing, a sealed one is a whole step of that rank.
"""

from __future__ import annotations

import json
import mmap
import os
from enum import IntEnum
from typing import Any, Final

MAGIC: Final = 0x4846534C_00000001
HEAD_BYTES: Final = 4096
TABLE_BYTES: Final = 1 << 20
DATA_OFFSET: Final = HEAD_BYTES + TABLE_BYTES
ERROR_BYTES_MAX: Final = 2048
SLOTS_PER_RANK: Final = 2


class SlotState(IntEnum):
    """EMPTY → COPYING → SEALED → FLUSHING → DONE or FAILED → COPYING …"""

    EMPTY = 0
    COPYING = 1
    SEALED = 2
    FLUSHING = 3
    DONE = 4
    FAILED = 5


class _Word(IntEnum):
    MAGIC = 0
    STATE = 1
    STEP = 2
    TABLE_BYTES = 3
    ERROR_BYTES = 4


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

    def seal(self, table: dict[str, Any]) -> None:
        """Declare the bytes complete. Raises `ValueError` when the table is too long."""
        content = json.dumps(table).encode()
        if len(content) > TABLE_BYTES:
            raise ValueError(
                f"a slot table of {len(content)} bytes: expected {TABLE_BYTES} or less"
            )
        self._map[HEAD_BYTES : HEAD_BYTES + len(content)] = content
        self._words[_Word.TABLE_BYTES] = len(content)
        self._words[_Word.STATE] = SlotState.SEALED

    def fail(self, reason: str) -> None:
        """Say that the step in this slot did not become durable, and why."""
        content = reason.encode()[:ERROR_BYTES_MAX]
        self._map[_ERROR_AT : _ERROR_AT + len(content)] = content
        self._words[_Word.ERROR_BYTES] = len(content)
        self._words[_Word.STATE] = SlotState.FAILED

    def close(self) -> None:
        """Unmap the slot from this process; views handed out must be gone by then."""
        self._words.release()
        self.data.release()
        self._map.close()
