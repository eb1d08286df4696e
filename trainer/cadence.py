"""When a checkpoint is due: by steps, by seconds, or `auto`; decided so that all ranks agree.

Ranks meet at *agreed steps* only, which every rank knows beforehand. By steps these are the
multiples of the interval. By seconds rank 0's clock decides: at an agreed step it says whether
to save now and which step is the next agreed one, in the one small collective that a save makes
anyway. Ordinary steps in between pay a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from holdfast.contracts.errors import SpecError
from holdfast.contracts.spec import Checkpointing

# Ten minutes lose little to a crash, and even a slow flush is over by then.
AUTO_INTERVAL_S: Final = 600.0
# The first meeting after a start: step times are known by then, and it costs next to nothing.
FIRST_LOOK_STEPS: Final = 8
# How far towards the due time the next meeting is put: steps may become slower meanwhile.
APPROACH: Final = 0.5
# Within this share of the interval the save is taken now rather than a few steps later.
SLACK: Final = 0.02


@dataclass(frozen=True)
class Interval:
    """Steps or seconds between checkpoints; exactly one of them is set."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str) -> Interval:
        """From 50, "50", "300s", "10m", "1h" or "auto". Raises `SpecError` for anything else."""
        given: int | str = int(value) if str(value).strip().isdigit() else value
        try:
            checked = Checkpointing(interval=given)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise SpecError(f"checkpoint interval {reason}") from error
        if checked.interval_steps is not None:
            return cls(steps=checked.interval_steps)
        return cls(seconds=checked.interval_s or AUTO_INTERVAL_S)


class Cadence:
    """The agreed steps of one session; times are monotonic seconds."""

    def __init__(self, interval: Interval, *, step: int, now: float) -> None:
        """`step` is the last complete one, from which training goes on."""
        self._interval = interval
        self._saved_at = now
        self._looked_at = now
        self._looked_step = step
        self.next_step = self._next_multiple(step) if interval.steps else step + FIRST_LOOK_STEPS

    def is_due(self, step: int) -> bool:
        """True when all ranks meet after `step`."""
        return step >= self.next_step

    def decide(self, step: int, now: float) -> tuple[bool, int]:
        """Rank 0 at an agreed step: (save now, the next agreed step)."""
        if self._interval.steps:
            return True, self._next_multiple(step)
        interval_s = self._interval.seconds
        assert interval_s is not None
        step_s = (now - self._looked_at) / max(step - self._looked_step, 1)
        remaining_s = interval_s - (now - self._saved_at)
        save = remaining_s <= max(SLACK * interval_s, step_s / 2)
        wait_s = APPROACH * (interval_s if save else remaining_s)
        return save, step + max(1, int(wait_s / max(step_s, 1e-9)))

    def settle(self, step: int, next_step: int, *, saved: bool, now: float) -> None:
        """Every rank after an agreed step: take over what was decided."""
        self.next_step = next_step
        self._looked_at, self._looked_step = now, step
        if saved:
            self._saved_at = now

    def _next_multiple(self, step: int) -> int:
        every = self._interval.steps
        assert every is not None
        return (step // every + 1) * every
