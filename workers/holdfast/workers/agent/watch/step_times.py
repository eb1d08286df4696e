"""Find a slowdown of all ranks for minutes, such as by a slow link. Pure, apart from its memory.

Ranks that meet in collectives take equally long for a step. If a node is slow, the others wait for
it, and its own wait is as before. If a link is slow, or the network or the data, all ranks wait
longer, the node on the link as well. So the rank whose wait has grown least tells which it is. It
does not tell which link it is: that takes a test, see `paired_test`.

Ranks that spin while they wait for a GPU seem to work all the time. Then a longer step may be
heavier work, and only a test can find a link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from holdfast.workers.agent.watch import slowdowns
from holdfast.workers.agent.watch.silence import RankStatus

# The least growth of any rank's wait, as a share of the growth of the step.
WAIT_SHARE: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class LongSteps:
    """Steps are longer than usual by the share `excess`, or no longer are.

    With `all_wait`, the reason is that all ranks wait longer, and none works longer.
    """

    excess: float
    all_wait: bool
    is_slow: bool = True

    @property
    def cost(self) -> float:
        """The share of a step that would not be there otherwise."""
        return self.excess / (1.0 + self.excess)


@dataclass
class _Usual:
    """The newest windows of a time, and what is usual for it."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=slowdowns.WINDOWS))
    usual_s: float = 0.0

    @property
    def growth_s(self) -> float:
        return median(self.times) - self.usual_s

    @property
    def newest_growth_s(self) -> float:
        # A slowdown is noticed when its windows are hardly more than half, so their mean counts.
        return sum(list(self.times)[-slowdowns.LOWEST :]) / slowdowns.LOWEST - self.usual_s

    def follow(self, step_s: float) -> None:
        """Let what is usual follow the newest window a little. `step_s` is a usual step."""
        change = (self.times[-1] - self.usual_s) / step_s
        change = max(-slowdowns.USUAL_CHANGE_MAX, min(slowdowns.USUAL_CHANGE_MAX, change))
        self.usual_s += change * slowdowns.USUAL_STEP * step_s


class StepTimes:
    """Notices that all steps take longer than usual, and that they no longer do."""

    def __init__(self) -> None:
        self._steps = _Usual()
        self._waits: dict[int, _Usual] = {}
        # The slowdown of now, as it was noticed.
        self.now: LongSteps | None = None

    def look(self, statuses: Sequence[RankStatus]) -> LongSteps | None:
        """Return a change, if there is one; call it once for each window of `statuses`.

        A window in which a rank does not train counts for none of them.
        """
        if not statuses or any(one.phase != "train" or one.step_s <= 0 for one in statuses):
            return None
        steps = self._steps
        steps.times.append(median(one.step_s for one in statuses))
        for one in statuses:
            self._waits.setdefault(one.rank, _Usual()).times.append(one.step_s - one.own_s)
        if len(steps.times) < slowdowns.WINDOWS:
            return None
        if not steps.usual_s:
            for each in (steps, *self._waits.values()):
                each.usual_s = median(each.times)
        if self.now is None:
            self._follow()
        return self._change()

    def _follow(self) -> None:
        usual_s = self._steps.usual_s
        for each in (self._steps, *self._waits.values()):
            each.follow(usual_s)

    def _change(self) -> LongSteps | None:
        steps, former = self._steps, self.now
        excess = steps.growth_s / steps.usual_s
        if former is not None:
            if excess >= slowdowns.USUAL - 1.0:
                return None
            self.now = None
            return LongSteps(excess=excess, all_wait=former.all_wait, is_slow=False)
        lowest = sum(sorted(steps.times)[: slowdowns.LOWEST]) / slowdowns.LOWEST
        if steps.times[-1] < steps.usual_s or lowest < slowdowns.SLOW * steps.usual_s:
            return None
        least_s = min(each.newest_growth_s for each in self._waits.values())
        all_wait = least_s >= WAIT_SHARE * steps.newest_growth_s
        self.now = LongSteps(excess=excess, all_wait=all_wait)
        return self.now


def describe_steps(found: LongSteps, *, will_test: bool) -> str:
    """Return a sentence for people."""
    if not found.is_slow:
        return "steps take as long as usual again"
    more = "a test of all pairs of nodes follows" if will_test else "the waits do not show which"
    return (
        f"steps take {found.excess:.0%} longer than usual: all ranks wait longer and none works "
        f"longer, so a link, the network or the data is slow; {more}"
    )
