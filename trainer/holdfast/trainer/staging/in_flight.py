"""A rank's saves from the seal until their results are taken."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.disk.paths import CheckpointName
from holdfast.trainer.placed import PlacedName
from holdfast.trainer.slots.slots import SlotState
from holdfast.trainer.staging.stage import Stage, StagedSlot

POLL_S: Final = 0.002


@dataclass(frozen=True)
class SaveResult:
    """The result of one save: committed, or the reason why not."""

    step: int
    checkpoint: str
    committed: bool
    error: str | None = None


class InFlight:
    """The saves that the flusher has not decided yet, and the results that nobody took yet."""

    def __init__(self) -> None:
        self._saves: dict[StagedSlot, CheckpointName | PlacedName] = {}
        self._results: list[SaveResult] = []

    def __contains__(self, staged: object) -> bool:
        return staged in self._saves

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of all saves whose results `take` has not returned."""
        # Each step boundary asks, and most have none.
        if not self._results and not self._saves:
            return ()
        decided = [result.step for result in self._results]
        return tuple(sorted([*decided, *(name.step for name in self._saves.values())]))

    def add(self, staged: StagedSlot, name: CheckpointName | PlacedName) -> None:
        """Add the save in a slot that was just sealed."""
        self._saves[staged] = name

    def drop(self, staged: StagedSlot, error: str) -> None:
        """Add the result of a save that could not be sealed after all."""
        name = self._saves.pop(staged)
        self._results.append(SaveResult(name.step, str(name), False, error))

    def update(self) -> list[int]:
        """Move the flusher's decisions to the results. Return the steps still being written."""
        for staged, name in sorted(self._saves.items(), key=lambda item: item[1].step):
            state = staged.slot.state
            if state is SlotState.DONE:
                self._results.append(SaveResult(name.step, str(name), True))
            elif state is SlotState.FAILED:
                self._results.append(SaveResult(name.step, str(name), False, staged.slot.error))
            else:
                continue
            del self._saves[staged]
        return sorted(name.step for name in self._saves.values())

    def find_free(self, stage: Stage, timeout_s: float) -> StagedSlot | None:
        """Return a slot to fill, or None if all are still being written after `timeout_s`."""
        give_up = time.monotonic() + timeout_s
        while True:
            self.update()
            staged = stage.free()
            if staged is not None and staged not in self:
                return staged
            # A free slot of a save was written after `update`. Filled now, its result would be
            # lost.
            if staged is None and time.monotonic() >= give_up:
                return None
            time.sleep(0.0 if staged else POLL_S)

    def wait(self, timeout_s: float) -> list[int]:
        """Wait until no save is being written. Return the steps that are after `timeout_s`."""
        give_up = time.monotonic() + timeout_s
        while (writing := self.update()) and time.monotonic() < give_up:
            time.sleep(POLL_S)
        return writing

    def take(self) -> list[SaveResult]:
        """Return the results since the last call, oldest first."""
        self.update()
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        """Read the decisions so far, and drop the saves without one: their slots are closing."""
        self.update()
        self._saves.clear()
