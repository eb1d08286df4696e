"""Detection of a bad loss: not finite, or far above the median of earlier losses. Pure.

The limit is `median + max(spike_mads x MAD, SPIKE_SHARE_MIN x |median|)`. MAD is the median
absolute deviation of the window's losses. Up to half of the losses may be outliers before the
median or the MAD moves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from holdfast.contracts.spec.sections import Numerics

# A converged loss hardly deviates, so an increase below this share of the median is no spike.
SPIKE_SHARE_MIN: Final = 0.5
# The minimum share of a full window before any loss counts as a spike.
WINDOW_SHARE_MIN: Final = 0.25
# The limit is computed again after this many losses. Sorting the window at each loss would cost
# more than the rest of a step boundary.
LIMIT_LOSSES: Final = 8
SHOWN_LOSSES: Final = 8


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A bad loss. `window` has the losses before it, oldest first. `limit` is set for a spike.

    `good_step` is the step of the last good loss, or the step after which training began.
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
    """Checks one rank's losses in step order, beginning after step `after`."""

    def __init__(self, numerics: Numerics, *, after: int = 0) -> None:
        self._numerics = numerics
        self._good_step = after
        self._window: deque[float] = deque(maxlen=numerics.window)
        self._needed = math.ceil(numerics.window * WINDOW_SHARE_MIN)
        self._median = 0.0
        self._limit = math.inf
        self._until_limit = LIMIT_LOSSES
        self._quiet_until = {"nan": 0, "spike": 0}

    @property
    def losses(self) -> list[float]:
        """The window's losses, oldest first."""
        return list(self._window)

    def resume(self, losses: Iterable[float]) -> None:
        """Continue after the window of losses that a checkpoint has."""
        self._window.extend(losses)
        self._set_limit()

    def look(self, step: int, loss: float) -> Anomaly | None:
        """Return the problem with the loss of `step`, or None if there is none.

        The same problem is reported again only after a window's length of steps.
        """
        if not math.isfinite(loss):
            return self._report("nan", step, loss)
        found = None
        if loss > self._limit:
            found = self._report("spike", step, loss)
        else:
            self._good_step = step
        self._window.append(loss)
        self._until_limit -= 1
        if self._until_limit <= 0:
            self._set_limit()
        return found

    def _set_limit(self) -> None:
        if len(self._window) >= self._needed:
            self._median, self._limit = spike_limit(self._window, self._numerics.spike_mads)
            self._until_limit = LIMIT_LOSSES

    def _report(self, problem: Literal["nan", "spike"], step: int, loss: float) -> Anomaly | None:
        if step < self._quiet_until[problem]:
            return None
        self._quiet_until[problem] = step + self._numerics.window
        return self.describe(problem, step, loss)

    def describe(self, problem: Literal["nan", "spike"], step: int, loss: float) -> Anomaly:
        """Return a bad loss with what is known of the losses before it."""
        is_spike = problem == "spike"
        return Anomaly(
            problem=problem,
            step=step,
            loss=loss,
            good_step=self._good_step,
            window=tuple(self._window)[-SHOWN_LOSSES:],
            median=self._median if is_spike else None,
            limit=self._limit if is_spike else None,
        )


def spike_limit(losses: Collection[float], spike_mads: float) -> tuple[float, float]:
    """Return (median, limit) of at least one loss. All losses are finite."""
    middle = median(losses)
    deviation = median([abs(loss - middle) for loss in losses])
    return middle, middle + max(spike_mads * deviation, SPIKE_SHARE_MIN * abs(middle))
