"""Which rank is slower than its peers: pure.

Ranks that meet in collectives take equally long for a step, whoever is the slow one. What differs
is how much of it each spends on its own: the share of moments in which its main thread did not
wait in the kernel for others (on a lock, a socket or a poll). A step's time times this share is
the rank's *own* time. Where waiting means to spin, as ranks do for a GPU, all shares are one and no
rank is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.workers.agent.silence import RankStatus

SLOW_FACTOR: Final = 1.5
# Of a step's time: less than this is noise, whatever the factor.
SLOW_SHARE: Final = 0.1
TIMES_MIN: Final = 3
RANKS_MIN: Final = 2


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank beside the median of its peers; seconds per step."""

    rank: int
    own_s: float
    peers_s: float
    step_s: float


def find_slow(statuses: Sequence[RankStatus]) -> list[Slow]:
    """The ranks whose own time is `SLOW_FACTOR` times their peers' median, and matters."""
    timed = [look for look in statuses if look.phase == "train" and look.step_s > 0]
    if len(timed) < RANKS_MIN:
        return []
    order = sorted(range(len(timed)), key=lambda number: timed[number].own_s)
    ordered = [timed[number].own_s for number in order]
    place_of = {number: place for place, number in enumerate(order)}
    found = []
    for number, look in enumerate(timed):
        peers_s = _median_without(ordered, place_of[number])
        matters = look.own_s - peers_s >= SLOW_SHARE * look.step_s
        if matters and look.own_s > SLOW_FACTOR * peers_s:
            found.append(
                Slow(rank=look.rank, own_s=look.own_s, peers_s=peers_s, step_s=look.step_s)
            )
    return found


def _median_without(ordered: Sequence[float], place: int) -> float:
    """The median of all but the one at `place`; there must be another."""
    count = len(ordered) - 1
    upper = count // 2
    lower = upper if count % 2 else upper - 1
    low, high = (ordered[n if n < place else n + 1] for n in (lower, upper))
    return low if lower == upper else (low + high) / 2


class Stragglers:
    """Names a rank once it was slow `TIMES_MIN` looks in a row, and once in a launch."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self._named: set[int] = set()

    def look(self, statuses: Sequence[RankStatus]) -> list[Slow]:
        """The ranks to name now; called once for each window of `statuses`."""
        slow = {one.rank: one for one in find_slow(statuses)}
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in slow}
        due = [one for rank, one in slow.items() if self._in_a_row[rank] >= TIMES_MIN]
        named = [one for one in due if one.rank not in self._named]
        self._named |= {one.rank for one in named}
        return named
