"""Node 0's side of the health checks: it has all nodes run them at once, and judges the answers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, Literal

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.health.checks import ALLREDUCE, Meeting
from holdfast.workers.agent.health.pairs import PairPlan
from holdfast.workers.agent.node import Node
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.agent.stops.listener import StopListener
from holdfast.workers.decisions.causes import Ending, UnhealthyNode, unhealthy_ending

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
        """Have the nodes in `meetings` run the checks at once; return the unhealthy ones."""
        self._round += 1
        self._group.ask_all(self._asking(checks, meetings))
        limit_s = len(checks) * self._health.timeout_s + MARGIN_S
        self._wait(limit_s, meetings)
        return self._unhealthy(limit_s, meetings)

    def _asking(
        self, checks: Sequence[str], meetings: Mapping[str, Meeting | None]
    ) -> Callable[[Node], object | Future[object]]:
        def ask(node: Node) -> object | Future[object]:
            if node.name not in meetings:
                return None
            meeting = meetings[node.name]
            return node.check_health(checks, self._round, meeting.to_json() if meeting else None)

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
