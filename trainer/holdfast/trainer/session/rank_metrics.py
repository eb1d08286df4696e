"""What a program reports while it trains: metrics, losses and its best value, and who gets them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from holdfast.trainer.metrics import BEST, Recorder, improved, numbers_in
from holdfast.trainer.numerics.guard import LossGuard
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.trackers.sink import TrackerSink, open_sink
from holdfast.trainer.trackers.tracker import Tracker


class RankMetrics:
    """Passes what one rank reports on to the recorder, the loss guard and the trackers.

    `best` is the best value of the metric `best_of`, as a checkpoint keeps it.
    """

    def __init__(
        self, context: RankContext, recorder: Recorder, best_of: tuple[str, str] | None
    ) -> None:
        self._context, self._recorder, self._best_of = context, recorder, best_of
        self.best: dict[str, Any] = {}
        self.sinks: list[TrackerSink] = []
        # The last step whose loss `observe` was given.
        self._observed = 0
        if best_of is not None and context.identity.rank == 0:
            recorder.watch.want(BEST, best_of[0])

    def resume(self, best: dict[str, Any]) -> str | None:
        """Restore the best value. Return what a person should know if it begins again."""
        # It counts if it is of the metric and the mode that now count.
        now = self._best_of or (best.get("metric"), best.get("mode"))
        self.best = best if (best.get("metric"), best.get("mode", now[1])) == now else {}
        if not best or self.best or self._best_of is None:
            return None
        return (
            f"session.best begins again for {' '.join(self._best_of)}: the checkpoint has the "
            f"best {best.get('metric')}, {best.get('mode')}"
        )

    def log(self, step: int, values: dict[str, float], guard: LossGuard) -> None:
        """Record the metrics of a step: see `Session.log`."""
        numbers = numbers_in(values)
        self.best = improved(self.best, self._best_of, numbers, step)
        if guard.metric in numbers and self._observed != step:
            guard.observe(step, numbers[guard.metric])
        self._recorder.log(step, numbers)
        for sink in self.sinks:
            sink.log(step, numbers)

    def observe(self, step: int, loss: float | Tensor, guard: LossGuard) -> None:
        """Watch the loss of a step: see `Session.observe`."""
        self._observed = step
        if self._recorder.watch.wanted:
            self._recorder.watch.meet((guard.metric,))
        guard.observe(step, loss)

    def track(self, tracker: Tracker, step: int) -> None:
        """Send metrics to a tracker, too: see `Session.track`."""
        if not isinstance(tracker, Tracker):
            raise TypeError(f"tracker={tracker!r}: expected a Tracker of holdfast.trainer.trackers")
        if self._context.identity.rank == 0:
            sink = open_sink(tracker, self._context, self._recorder, step=step)
            self.sinks += [sink] if sink is not None else []
