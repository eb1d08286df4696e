"""Node 0's side of the standbys: when all nodes start one, and whether the next start uses them."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Collection, Sequence

from holdfast.contracts.errors import AgreementError
from holdfast.contracts.journal import EventKind, read_journal
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.runtime import Node, NodeReport


class StandbyPlan:
    """One standby at a time, of all nodes together, for the launch after the present one."""

    def __init__(
        self, context: AgentContext, address: Callable[[], str], note: Callable[[str], None]
    ) -> None:
        self._context, self._address, self._note = context, address, note
        self._number, self._port = 0, 0
        self._since, self._is_decided = 0.0, False

    def take_port(self, number: int, nodes: Sequence[Node], reports: Collection[NodeReport]) -> int:
        """The port for launch `number`: the standbys' where every node has one, else another.

        A node whose standby is for another port ends that one and starts again.
        """
        ready = [report.standby for report in reports]
        is_ready = self._port and len(ready) == len(nodes) and set(ready) == {number}
        ports = self._context.request.supervision.port_range
        port = self._port if is_ready else free_port(ports)
        self._number, self._port = number, 0
        self._since, self._is_decided = 0.0, False
        return port

    def look(self, nodes: Sequence[Node], reports: Collection[NodeReport], restarts: int) -> None:
        """Have every node start a warm standby once training has gone on for `standby_after_s`.

        Loading costs the nodes seconds of their processors: not while a run is being tried out.
        Raises `ConnectionError` when a node is gone.
        """
        supervision = self._context.request.supervision
        after_s = supervision.standby_after_s
        if self._is_decided or after_s == "off":
            return
        if not reports or any(report.completed <= report.resumed for report in reports):
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < after_s:
            return
        self._is_decided = True
        if restarts >= supervision.restarts_in_place or not self._may_load_ahead():
            return
        self._port, address = free_port(supervision.port_range), self._address()
        for node in reversed(nodes):
            node.prepare(self._number + 1, address, self._port)

    def _may_load_ahead(self) -> bool:
        """True unless the program sets what libraries read when they are loaded.

        A program that has not said what it resumed from has no session, and nothing is known.
        """
        attempt, place = self._context.attempt, (self._context.attempt.number, self._number)
        for event in reversed(read_journal(attempt.rank_journal)[0]):
            told = (event.data.get("attempt"), event.data.get("launch"))
            if event.kind is EventKind.RESUMED and told == place:
                changed = event.data.get("changed_variables", [])
                if changed:
                    self._note(f"no warm standby: the program itself sets {', '.join(changed)}")
                return not changed
        return False


def free_port(ports: range | None) -> int:
    """A port of `ports`, or any, that was free a moment ago.

    Were it taken since, the launch is started again. Raises `AgreementError` when all are.
    """
    for port in [0] if ports is None else random.sample(ports, len(ports)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise AgreementError(f"no port for torchrun is free of {ports}; give supervision.ports more")
