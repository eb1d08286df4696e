"""When a checkpoint is due, by steps, by seconds or `auto`, so that all ranks agree.

Ranks meet only at *agreed steps*, which every rank knows beforehand. An interval in steps makes
these its multiples. For seconds, rank 0's clock decides: at an agreed step, rank 0 chooses whether
to save now and which step is the next agreed one. This uses the one small collective that a save
needs anyway. Normal steps in between cost a comparison. `auto` uses seconds, which rank 0 corrects
as it measures the cost of saves. To learn the duration of steps, the first meetings come early and
then at growing distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from holdfast.contracts.errors import SpecError
from holdfast.contracts.spec.checkpoint import Checkpointing

# Ten minutes lose little work in a crash, and even a slow flush ends within them.
AUTO_INTERVAL_S: Final = 600.0
# The first meeting after a start. Step times are known by then, and it costs almost nothing.
FIRST_LOOK_STEPS: Final = 8
# Each early meeting comes at this multiple of the steps since the start.
LOOK_GROWTH: Final = 3
# The share of the remaining time until the next meeting, because steps may become slower.
APPROACH: Final = 0.5
# The farthest agreed step. The ranks exchange its number in few bits, see `RankRecord.say`.
AHEAD_STEPS_MAX: Final = 1 << 31
# Within this share of the interval, the save is taken now instead of a few steps later.
SLACK: Final = 0.02

# A decision to save for which training waits. An ordinary save is 1.
MUST_SAVE: Final = 2


@dataclass(frozen=True)
class Interval:
    """Steps or seconds between checkpoints. Exactly one of them is set.

    With `is_auto`, the seconds apply until costs are known. With `doubling`, checkpoints are also
    saved after this step and each doubling of it.
    """

    steps: int | None = None
    seconds: float | None = None
    is_auto: bool = False
    doubling: int | None = None

    @classmethod
    def parse(cls, value: int | str) -> Interval:
        """Parse 50, "50", "300s", "10m", "1h" or "auto". Raises `SpecError` for anything else."""
        given: int | str = int(value) if _is_count(value) else value
        try:
            checked = Checkpointing(interval=given)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise SpecError(f"checkpoint interval {reason}") from error
        if checked.interval_steps is not None:
            return cls(steps=checked.interval_steps)
        if checked.interval_s is None:
            return cls(seconds=AUTO_INTERVAL_S, is_auto=True)
        return cls(seconds=checked.interval_s)


def _is_count(value: int | str) -> bool:
    """Return True for digits, as in an environment variable."""
    text = str(value).strip()
    return text.isascii() and text.isdecimal()


class Cadence:
    """The agreed steps of one session. Times are monotonic seconds."""

    def __init__(
        self,
        interval: Interval,
        *,
        step: int,
        now: float,
        looks_early: bool = False,
        looks_first: bool = False,
    ) -> None:
        """`step` is the last complete step, after which training continues.

        With `looks_first`, the ranks meet after the first step, which creates state to plan for.
        """
        self._interval = interval
        self._interval_s = interval.seconds or 0.0
        self._saved_at = self._looked_at = now
        self._looked_step = self._first_step = step
        self._looks_early = looks_early or interval.is_auto
        self.next_step = step + FIRST_LOOK_STEPS
        if interval.steps:
            self.next_step = self._by_steps(step)
        self.next_step = min(self.next_step, self._next_doubling(step))
        if looks_first:
            self.next_step = step + 1

    def adopt(self, interval_s: float) -> None:
        """On rank 0, with `auto`, set the seconds between checkpoints."""
        self._interval_s = interval_s

    def is_due(self, step: int) -> bool:
        """Return True if all ranks meet after `step`."""
        return step >= self.next_step

    def decide(self, step: int, now: float) -> tuple[int, int]:
        """Decide on rank 0 at an agreed step. Return (save now, the next agreed step).

        A save that must not be left out, even if storage is slow, is `MUST_SAVE`.
        """
        save, next_step = self._decide(step, now)
        # Not only at the step itself: the meeting may have waited for the end of an epoch.
        if self._interval.doubling and self._next_doubling(self._looked_step) <= step:
            save = MUST_SAVE
        return save, min(next_step, self._next_doubling(step))

    def _decide(self, step: int, now: float) -> tuple[int, int]:
        """Decide by the interval alone."""
        if self._interval.steps:
            return step % self._interval.steps == 0, self._by_steps(step)
        interval_s = self._interval_s
        step_s = (now - self._looked_at) / max(step - self._looked_step, 1)
        remaining_s = interval_s - (now - self._saved_at)
        save = remaining_s <= max(SLACK * interval_s, step_s / 2)
        wait_s = APPROACH * (interval_s if save else remaining_s)
        next_step = step + max(1, int(wait_s / max(step_s, 1e-9)))
        return save, min(next_step, self._next_look(step))

    def update(self, step: int, next_step: int, *, saved: bool, now: float) -> None:
        """Apply the decision of an agreed step, on every rank."""
        self.next_step = next_step
        self._looked_at, self._looked_step = now, step
        if saved:
            self._saved_at = now

    def _by_steps(self, step: int) -> int:
        every = self._interval.steps
        assert every is not None
        return min((step // every + 1) * every, self._next_look(step))

    def _next_doubling(self, step: int) -> int:
        """Return the next doubling after `step`. If none is wanted, it is as far as possible."""
        first = self._interval.doubling
        if first is None:
            return step + AHEAD_STEPS_MAX
        return first << (step // first).bit_length()

    def _next_look(self, step: int) -> int:
        """Return the next early meeting. If none is wanted, it is as far as a meeting can be."""
        if not self._looks_early:
            return step + AHEAD_STEPS_MAX
        since = step - self._first_step
        return self._first_step + max(FIRST_LOOK_STEPS, since * LOOK_GROWTH)
