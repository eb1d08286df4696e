"""The duration of steps, with and without a flush beside them."""

from __future__ import annotations


class StepMeter:
    """Measures the duration of steps, separately for steps during a flush. Constant memory."""

    def __init__(self, now: float) -> None:
        self._entered_at = now
        self._steps = [0, 0]
        self._seconds = [0.0, 0.0]

    def leave(self, now: float, *, is_flushing: bool) -> None:
        """Record that a step is complete."""
        self._steps[is_flushing] += 1
        self._seconds[is_flushing] += now - self._entered_at
        self._entered_at = now

    def enter(self, now: float) -> None:
        """Record that the next step begins. Work since `leave` belongs to no step."""
        self._entered_at = now

    @property
    def step_s(self) -> float:
        """The mean seconds of a step since the last `restart`, or 0 without steps."""
        steps = sum(self._steps)
        return sum(self._seconds) / steps if steps else 0.0

    @property
    def slowed_s(self) -> float:
        """The seconds that flushes added to steps, or 0 until both kinds were measured."""
        if not all(self._steps):
            return 0.0
        quiet_s = self._seconds[False] / self._steps[False]
        return max(0.0, self._seconds[True] - self._steps[True] * quiet_s)

    def restart(self) -> None:
        """Start to count again, because the pace may have changed."""
        self._steps, self._seconds = [0, 0], [0.0, 0.0]
