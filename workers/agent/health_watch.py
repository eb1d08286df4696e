"""Node 0's side of the health checks: it has all nodes run them at once, and judges the answers."""

from __future__ import annotations

import time
from typing import Final, Literal

from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.spec_health import Health
from holdfast.workers.agent.listener import StopListener
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.causes import Ending, UnhealthyNode, unhealthy_ending

POLL_S: Final = 0.05
# A check is ended at its limit, but a process that waits for a device may not end.
MARGIN_S: Final = 60.0


class HealthWatch:
    """`ending` is how the attempt ends because of the checks, and `hosts` are to be excluded."""

    def __init__(
        self,
        health: Health,
        group: NodeGroup,
        listener: StopListener,
        journal: JournalWriter,
        attempt: int,
    ) -> None:
        self.ending: Ending | None = None
        self.hosts: tuple[str, ...] = ()
        self._health, self._group, self._listener = health, group, listener
        self._journal, self._attempt = journal, attempt
        self._round = 0

    def passes(self, when: Literal["before", "after"]) -> bool:
        """Run the checks on all nodes; return False if training must not start.

        Then either `ending` says why, or a stop has been requested meanwhile.
        """
        checks = self._health.before if when == "before" else self._health.after
        if not checks:
            return True
        self._round += 1
        self._group.ask_all(lambda node: node.check_health(checks, self._round))
        limit_s = len(checks) * self._health.timeout_s + MARGIN_S
        if not self._wait(limit_s):
            self._group.ask_all(lambda node: node.kill())
            return False
        bad = self._unhealthy(limit_s)
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

    def _wait(self, limit_s: float) -> bool:
        """Wait until every node has answered or the limit; return False for a requested stop."""
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            self._listener.wait(POLL_S)
            if self._listener.stop_request is not None:
                return False
            self._group.poll()
            if all(self._has_answered(node.name) for node in self._group.nodes):
                return True
        return True

    def _has_answered(self, name: str) -> bool:
        report = self._group.reports.get(name)
        return (
            report is not None
            and report.health is not None
            and (report.health.round == self._round)
        )

    def _unhealthy(self, limit_s: float) -> list[UnhealthyNode]:
        """Return the nodes with a failed check. Lost nodes end the launch that follows."""
        found = []
        for node in self._group.nodes:
            if not self._has_answered(node.name):
                problem = f"its checks gave no result within {limit_s:.0f} s"
                found.append(UnhealthyNode(host=node.name, check="", problem=problem))
                continue
            finding = self._group.reports[node.name].health
            if finding is not None and finding.problem:
                found.append(
                    UnhealthyNode(host=node.name, check=finding.check, problem=finding.problem)
                )
        return found
