"""Which nodes test each other, and which of them are bad by the results. Pure functions of these.

A test of two nodes passes if both are good. So a node that passed once is good, and a node that
failed with a good one is bad.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

# Two rounds are enough if at most a quarter of the nodes is bad, three for a third. Only sets of
# bad nodes that are nearly half of all need more.
ROUNDS_MAX: Final = 12

Pair = tuple[str, str]


class PairPlan:
    """The rounds of tests over the nodes `names`, until every node is known to be good or bad.

    `good` and `bad` are the nodes known so far, and `rounds` counts the rounds that were tested.
    """

    def __init__(self, names: Sequence[str]) -> None:
        # Neighbours in the list often share a switch. Pairs of distant nodes use more of the
        # network.
        half = len(names) // 2
        near, far = names[len(names) - 2 * half :][:half], names[len(names) - half :]
        alone = [] if len(names) % 2 == 0 else [names[0]]
        self._names = [*alone, *(name for pair in zip(near, far, strict=True) for name in pair)]
        self._failed: dict[str, set[str]] = {name: set() for name in names}
        self.good: set[str] = set()
        self._bad: set[str] = set()
        self.rounds = 0

    @property
    def bad(self) -> list[str]:
        """The nodes that failed with a good one and passed with none, in order."""
        return [name for name in self._names if self._is_bad(name)]

    @property
    def undecided(self) -> list[str]:
        """The nodes that are not known to be good or bad."""
        return [name for name in self._names if name not in self.good and not self._is_bad(name)]

    @property
    def is_hopeless(self) -> bool:
        """True if no node can be good, or so many are bad that none can be told from the others.

        With an even number of nodes, one round of failures proves that half of them are bad. With
        an odd number, the node that was not tested must also fail with both nodes of a pair.
        """
        return not self.good and self.rounds >= (3 if len(self._names) % 2 else 1)

    def next_pairs(self) -> list[Pair]:
        """Return the pairs that are tested at once in the next round; none if nothing is left."""
        if self.rounds == 0:
            first = self._names[len(self._names) % 2 :]
            return list(zip(first[::2], first[1::2], strict=True))
        if self.is_hopeless or self.rounds >= ROUNDS_MAX:
            return []
        waiting, good = self.undecided, [name for name in self._names if name in self.good]
        pairs: list[Pair] = []
        for name in self._most_useful(waiting)[: len(good)]:
            pairs.append((name, good[len(pairs)]))
        asked = {name for name, _ in pairs}
        return pairs + self._pairs_among([name for name in waiting if name not in asked])

    def take(self, passed: Iterable[Pair], failed: Iterable[Pair], silent: Iterable[str]) -> None:
        """Take the results of a round. Nodes that gave no result are bad whatever else is known."""
        for one, other in passed:
            self.good |= {one, other}
        for one, other in failed:
            self._failed[one].add(other)
            self._failed[other].add(one)
        self._bad |= set(silent)
        self.rounds += 1

    def _is_bad(self, name: str) -> bool:
        return name in self._bad or (name not in self.good and bool(self._failed[name] & self.good))

    def _most_useful(self, waiting: Sequence[str]) -> list[str]:
        """Order the nodes to test with good ones: those first that are probably good themselves.

        Of two nodes that failed together, the second comes late: if the first is good, the second
        is bad.
        """
        open_failures = {name: self._failed[name] & set(waiting) for name in waiting}
        first: list[str] = []
        late: list[str] = []
        covered: set[str] = set()
        for name in sorted(waiting, key=lambda name: len(open_failures[name])):
            (late if name in covered else first).append(name)
            if name not in covered:
                covered |= open_failures[name]
        return first + late

    def _pairs_among(self, waiting: Sequence[str]) -> list[Pair]:
        """Return pairs of undecided nodes that have not been tested with each other."""
        pairs: list[Pair] = []
        left = list(waiting)
        while left:
            one = left.pop(0)
            other = next((name for name in left if name not in self._failed[one]), None)
            if other is not None:
                left.remove(other)
                pairs.append((one, other))
        return pairs
