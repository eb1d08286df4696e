"""A staging slot that the flusher holds, and its view at one moment."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

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
