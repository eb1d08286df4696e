"""A staging slot that the flusher holds, and its view at one moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.durable import fsync_directory, make_directory
from holdfast.trainer.flusher.files import write_file
from holdfast.trainer.flusher.hints import log
from holdfast.trainer.flusher.plan import SlotKey, SlotView
from holdfast.trainer.slots.slot_table import SlotTable
from holdfast.trainer.slots.slots import DATA_OFFSET, Slot, SlotState


@dataclass
class HeldSlot:
    """A slot that the flusher holds by its descriptor. `resumed`: an earlier flusher began it."""

    handle: int
    slot: Slot
    local_rank: int | None = None
    resumed: bool = False
    is_orphan: bool = False

    def view(self, key: SlotKey, *, is_deserted: bool = False) -> SlotView:
        """Return the slot's present content. A sealed slot that cannot be read becomes FAILED.

        A living rank may overwrite a snapshot at any moment. The table of a snapshot is therefore
        read only with `is_deserted`, when no rank is left.
        """
        state, step = self.slot.state, self.slot.step
        is_readable = state is SlotState.SEALED or (state is SlotState.SNAPSHOT and is_deserted)
        if not is_readable:
            return self._bare_view(key, state, step)
        try:
            table = SlotTable.parse(self.slot.table)
            self.local_rank = table.local_rank
            return SlotView(
                key=key,
                state=state,
                step=step,
                local_rank=self.local_rank,
                local_ranks=table.local_ranks,
                checkpoint=table.checkpoint,
                is_former=self.is_orphan,
            )
        except ValueError as error:
            # Every peer waits for this step. A failed slot ends that wait, with the reason.
            self.slot.fail(f"the slot's table cannot be read: {error}")
            return self._bare_view(key, SlotState.FAILED, step)

    def free(self) -> None:
        """Free the slot's memory.

        The file is truncated, which frees its pages although the supervisor holds it too.
        """
        with contextlib.suppress(BufferError):
            self.slot.close()
        os.ftruncate(self.handle, DATA_OFFSET)
        os.close(self.handle)

    def _bare_view(self, key: SlotKey, state: SlotState, step: int) -> SlotView:
        return SlotView(
            key=key, state=state, step=step, local_rank=self.local_rank, is_former=self.is_orphan
        )


# Files of the program's framework that the flusher writes beside the checkpoints.
#
# A rank stages such a file in a slot with a negative number: see `staging.program_files`. A file
# that was sealed before a step is written before that step. So a committed checkpoint never refers
# to a file that was lost with its rank.

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
