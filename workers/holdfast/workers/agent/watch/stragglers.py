"""Find ranks that are slower than their peers, purely.

Ranks that meet in collectives all take equally long for a step. What differs is how much of it each
rank spends on its own work: the share of samples in which its main thread did not wait in the
kernel for others (on a lock, a socket or a poll). The time of a step times this share is the rank's
*own* time. Where ranks spin while they wait, as for a GPU, all shares are one and no rank is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.workers.agent.watch.silence import RankStatus

SLOW_FACTOR: Final = 1.5
# A smaller share of a step's time is noise, whatever the factor.
SLOW_SHARE: Final = 0.1
TIMES_MIN: Final = 3
RANKS_MIN: Final = 2


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank and the median of its peers, in seconds per step."""

    rank: int
    own_s: float
    peers_s: float
    step_s: float


def find_slow(statuses: Sequence[RankStatus]) -> list[Slow]:
    """Return the ranks whose own time is well above `SLOW_FACTOR` times their peers' median."""
    timed = [status for status in statuses if status.phase == "train" and status.step_s > 0]
    if len(timed) < RANKS_MIN:
        return []
    order = sorted(range(len(timed)), key=lambda number: timed[number].own_s)
    ordered = [timed[number].own_s for number in order]
    place_of = {number: place for place, number in enumerate(order)}
    found = []
    for number, status in enumerate(timed):
        peers_s = _median_without(ordered, place_of[number])
        matters = status.own_s - peers_s >= SLOW_SHARE * status.step_s
        if matters and status.own_s > SLOW_FACTOR * peers_s:
            found.append(
                Slow(rank=status.rank, own_s=status.own_s, peers_s=peers_s, step_s=status.step_s)
            )
    return found


def _median_without(ordered: Sequence[float], place: int) -> float:
    """Return the median of all but the one at `place`; there must be at least one other."""
    count = len(ordered) - 1
    upper = count // 2
    lower = upper if count % 2 else upper - 1
    low, high = (ordered[n if n < place else n + 1] for n in (lower, upper))
    return low if lower == upper else (low + high) / 2


class Stragglers:
    """Names a rank that was slow in `TIMES_MIN` checks in a row, once per launch."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self._named: set[int] = set()

    def look(self, statuses: Sequence[RankStatus]) -> list[Slow]:
        """Return the ranks to name now; call it once for each window of `statuses`."""
        slow = {one.rank: one for one in find_slow(statuses)}
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in slow}
        due = [one for rank, one in slow.items() if self._in_a_row[rank] >= TIMES_MIN]
        named = [one for one in due if one.rank not in self._named]
        self._named |= {one.rank for one in named}
        return named
