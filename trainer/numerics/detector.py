"""Whether a loss is bad: not finite, or far above the median of those before it. Pure.

The limit is `median + max(spike_mads x MAD, SPIKE_SHARE_MIN x |median|)`, MAD being the median
absolute deviation of the window's losses: half of them may be outliers before either moves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from holdfast.contracts.spec import Numerics

# A loss that has come to rest deviates by next to nothing; less than this above it is no spike.
SPIKE_SHARE_MIN: Final = 0.5
# Of a window, so many of its losses must be there before anything is called a spike.
WINDOW_SHARE_MIN: Final = 0.25
# The limit is computed again after so many losses: sorting the window at each would cost more
# than all the rest of a boundary.
LIMIT_LOSSES: Final = 8
TOLD_LOSSES: Final = 8


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A bad loss. `window` are the losses before it, oldest first; `limit` is set for a spike.

    The last good loss was that of step `good_step`, or training began again after it.
    """

    problem: Literal["nan", "spike"]
    step: int
    loss: float
    good_step: int
    window: tuple[float, ...] = ()
    median: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        if self.problem == "nan":
            return f"the loss of step {self.step} is {self.loss}"
        return f"the loss of step {self.step}, {self.loss:.6g}, is above the limit {self.limit:.6g}"


class Detector:
    """Looks at one rank's losses in the order of steps, the first of them after step `after`."""

    def __init__(self, numerics: Numerics, *, after: int = 0) -> None:
        self._numerics = numerics
        self._good_step = after
        self._window: deque[float] = deque(maxlen=numerics.window)
        self._needed = math.ceil(numerics.window * WINDOW_SHARE_MIN)
        self._median = 0.0
        self._limit = math.inf
        self._until_limit = LIMIT_LOSSES
        self._quiet_until = {"nan": 0, "spike": 0}

    def look(self, step: int, loss: float) -> Anomaly | None:
        """What is wrong with the loss of `step`; None when nothing is.

        What was told of one problem stands for a window's length of steps.
        """
        if not math.isfinite(loss):
            return self._tell("nan", step, loss)
        found = None
        if loss > self._limit:
            found = self._tell("spike", step, loss)
        else:
            self._good_step = step
        self._window.append(loss)
        self._until_limit -= 1
        if self._until_limit <= 0 and len(self._window) >= self._needed:
            self._median, self._limit = spike_limit(self._window, self._numerics.spike_mads)
            self._until_limit = LIMIT_LOSSES
        return found

    def _tell(self, problem: Literal["nan", "spike"], step: int, loss: float) -> Anomaly | None:
        if step < self._quiet_until[problem]:
            return None
        self._quiet_until[problem] = step + self._numerics.window
        is_spike = problem == "spike"
        return Anomaly(
            problem=problem,
            step=step,
            loss=loss,
            good_step=self._good_step,
            window=tuple(self._window)[-TOLD_LOSSES:],
            median=self._median if is_spike else None,
            limit=self._limit if is_spike else None,
        )


def spike_limit(losses: Collection[float], spike_mads: float) -> tuple[float, float]:
    """(median, limit) of `losses`, which are finite and at least one."""
    middle = median(losses)
    deviation = median(abs(loss - middle) for loss in losses)
    return middle, middle + max(spike_mads * deviation, SPIKE_SHARE_MIN * abs(middle))
