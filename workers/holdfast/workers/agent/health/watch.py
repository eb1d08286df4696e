"""Node 0's side of the health checks: all nodes run them together, and it judges the answers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Final, Literal

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.health.checks import ALLREDUCE, Meeting
from holdfast.workers.agent.node import LedNode
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.agent.stops.listener import StopListener
from holdfast.workers.decisions.causes import Ending, UnhealthyNode, unhealthy_ending

# Which nodes test each other, and which of them are bad by the results. Pure functions of these.
#
# A test of two nodes passes if both are good. So a node that passed once is good, and a node that
# failed with a good one is bad.

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
        """Return the pairs that are tested together in the next round; none if nothing is left."""
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


POLL_S: Final = 0.05
# A check is ended at its limit, but a process that waits for a device may not end.
MARGIN_S: Final = 60.0


class HealthWatch:
    """`ending` is how the attempt ends because of the checks, and `hosts` are to be excluded."""

    def __init__(
        self,
        context: AgentContext,
        group: NodeGroup,
        listener: StopListener,
        journal: JournalWriter,
    ) -> None:
        self.ending: Ending | None = None
        self.hosts: tuple[str, ...] = ()
        self._health, self._group, self._listener = context.request.health, group, listener
        self._journal, self._attempt = journal, context.attempt.number
        self._folder = context.attempt.health
        self._round = 0

    def passes(self, when: Literal["before", "after"]) -> bool:
        """Run the checks on all nodes; return False if training must not start.

        Then either `ending` says why, or a stop has been requested meanwhile.
        """
        checks = self._health.before if when == "before" else self._health.after
        own = [check for check in checks if check != ALLREDUCE]
        bad: list[UnhealthyNode] = []
        try:
            if own:
                names = [node.name for node in self._group.nodes]
                bad = self._run(own, dict.fromkeys(names))
            if not bad and ALLREDUCE in checks:
                bad = self._run_pairs()
        except _Stopped:
            self._group.ask_all(lambda node: node.kill())
            return False
        for one in bad:
            self._journal.append(
                EventKind.NODE_UNHEALTHY,
                attempt=self._attempt,
                host=one.host,
                check=one.check,
                detail=one.problem,
            )
        if bad:
            self.ending, self.hosts = unhealthy_ending(bad, len(self._group.nodes))
        return not bad

    def _run_pairs(self) -> list[UnhealthyNode]:
        """Have pairs of nodes run the all-reduce, until the bad nodes are known; return them."""
        names = [node.name for node in self._group.nodes]
        try:
            if len(names) == 1:
                return self._run([ALLREDUCE], self._meetings([names]))
            return self._find_bad(names)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _find_bad(self, names: list[str]) -> list[UnhealthyNode]:
        plan, problems = PairPlan(names), dict[str, str]()
        while pairs := plan.next_pairs():
            found = {one.host: one for one in self._run([ALLREDUCE], self._meetings(pairs))}
            failed = [pair for pair in pairs if found.keys() & set(pair)]
            for one, other in failed:
                for name, partner in ((one, other), (other, one)):
                    seen = found.get(name) or found[partner]
                    problems[name] = f"the all-reduce with {partner} failed: {seen.problem}"
            if self._group.lost:
                # The launch that follows ends because of the loss, so no other node is at fault.
                return []
            silent = [one.host for one in found.values() if not one.check]
            plan.take([pair for pair in pairs if pair not in failed], failed, silent)
        blamed = plan.bad or (names if plan.is_hopeless else [])
        if problems and not blamed:
            text = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
            self._note(f"the nodes passed with other nodes, so none is excluded: {text}")
        return [
            UnhealthyNode(host=name, check=ALLREDUCE, problem=problems.get(name, "not tested"))
            for name in blamed
        ]

    def _meetings(self, groups: Sequence[Sequence[str]]) -> Mapping[str, Meeting]:
        make_directory(self._folder)
        return {
            name: Meeting(
                file=str(self._folder / f"{self._round + 1:03d}-{number:04d}.json"),
                node=place,
                nodes=len(members),
            )
            for number, members in enumerate(groups)
            for place, name in enumerate(members)
        }

    def _run(
        self, checks: Sequence[str], meetings: Mapping[str, Meeting | None]
    ) -> list[UnhealthyNode]:
        """Have the nodes in `meetings` run the checks together; return the unhealthy ones."""
        self._round += 1
        self._group.ask_all(self._asking(checks, meetings))
        limit_s = len(checks) * self._health.timeout_s + MARGIN_S
        self._wait(limit_s, meetings)
        return self._unhealthy(limit_s, meetings)

    def _asking(
        self, checks: Sequence[str], meetings: Mapping[str, Meeting | None]
    ) -> Callable[[LedNode], object | Future[object]]:
        def ask(node: LedNode) -> object | Future[object]:
            if node.name not in meetings:
                return None
            meeting = meetings[node.name]
            return node.check_health(checks, self._round, asdict(meeting) if meeting else None)

        return ask

    def _wait(self, limit_s: float, asked: Mapping[str, object]) -> None:
        """Wait until every asked node has answered or the limit. Raises `_Stopped` for a stop."""
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            self._listener.wait(POLL_S)
            if self._listener.stop_request is not None:
                raise _Stopped
            self._group.poll()
            present = [node.name for node in self._group.nodes if node.name in asked]
            if all(self._has_answered(name) for name in present):
                return

    def _has_answered(self, name: str) -> bool:
        report = self._group.reports.get(name)
        return (
            report is not None
            and report.health is not None
            and (report.health.round == self._round)
        )

    def _unhealthy(self, limit_s: float, asked: Mapping[str, object]) -> list[UnhealthyNode]:
        """Return the nodes with a failed check. Lost nodes end the launch that follows."""
        found = []
        for name in [node.name for node in self._group.nodes if node.name in asked]:
            finding = self._group.reports[name].health if self._has_answered(name) else None
            if finding is None:
                problem = f"its checks gave no result within {limit_s:.0f} s"
                found.append(UnhealthyNode(host=name, check="", problem=problem))
            elif finding.problem:
                found.append(UnhealthyNode(host=name, check=finding.check, problem=finding.problem))
        return found

    def _note(self, text: str) -> None:
        self._journal.append(EventKind.NOTE, attempt=self._attempt, text=text)


class _Stopped(Exception):
    """A stop was requested while the checks ran."""
