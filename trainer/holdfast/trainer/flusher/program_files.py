"""Files of the program's framework that the flusher writes beside the checkpoints.

A rank stages such a file in a slot with a negative number: see `staging.program_files`. A file that
was sealed before a step is written before that step. So a committed checkpoint never refers to a
file that was lost with its rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.durable import fsync_directory, make_directory
from holdfast.trainer.flusher.files import write_file
from holdfast.trainer.flusher.held_slot import HeldSlot
from holdfast.trainer.flusher.hints import log
from holdfast.trainer.flusher.plan import SlotKey
from holdfast.trainer.slots.slots import Slot, SlotState

_PENDING: Final = {SlotState.SEALED, SlotState.FLUSHING}


@dataclass(frozen=True)
class ProgramFile:
    """A sealed slot with one file."""

    slot: Slot

    def write(self) -> None:
        """Write the file durably. The slot then has the result."""
        try:
            table = self.slot.table
            path = Path(table["path"])
            make_directory(path.parent)
            with self.slot.data[: table["bytes"]] as content:
                write_file(path, content, replace=True)
            # A checkpoint that is written after this may name the file, so its name is durable
            # first, see decision 80.
            fsync_directory(path.parent)
        except Exception as problem:
            # The writer thread must continue with the next step, whatever is wrong with this file.
            log(f"a file of the program is not written: {problem}")
            self.slot.fail(f"{type(problem).__name__}: {problem}")
        else:
            self.slot.state = SlotState.DONE


def is_of_program(key: SlotKey) -> bool:
    """Return True for a slot with a file of the program, False for one with a rank's step."""
    return key[2] < 0


def new_keys(
    held: Collection[SlotKey], launch: int, rank: int, *, of_program: bool, count: int
) -> list[SlotKey]:
    """Return the keys of a rank's next `count` slots, which no slot has at present."""
    numbers = [key[2] for key in held if key[:2] == (launch, rank)]
    # Negative numbers never collide with those of steps, see decision 80.
    first, sign = (min([0, *numbers]), -1) if of_program else (max([-1, *numbers]), 1)
    return [(launch, rank, first + sign * (1 + i)) for i in range(count)]


def take_sealed(held: Mapping[SlotKey, HeldSlot]) -> list[ProgramFile]:
    """Return the files to write, oldest first, and mark them as being written."""
    sealed = [
        each.slot
        for key, each in held.items()
        if is_of_program(key) and each.slot.state is SlotState.SEALED
    ]
    for slot in sealed:
        slot.state = SlotState.FLUSHING
    return [ProgramFile(slot) for slot in sorted(sealed, key=lambda slot: slot.step)]


def are_pending(held: Mapping[SlotKey, HeldSlot]) -> bool:
    """Return True until all staged files are written."""
    return any(is_of_program(key) and each.slot.state in _PENDING for key, each in held.items())
