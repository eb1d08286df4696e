"""Have a suspected slowdown proved by a short test of all ranks, and keep the proofs.

With `health.slowdown = "ask"` or `"act"`, a suspicion makes node 0 agree with all ranks on a test
at a step boundary. Rank 0 journals what they measured. Only a node that the test proves slow is
left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.disk.journal_follow import KEPT
from holdfast.contracts.errors import HoldfastError
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.watch.slowdowns import SlowNode, describe, drain_hint
from holdfast.workers.agent.watch.step_times import LongSteps, describe_steps
from holdfast.workers.decisions.paired_test import PairedResults, PairedVerdict, judge

# Between two tests of a launch. It doubles after each test that proved nothing.
GAP_S: Final = 600.0
DOUBLINGS_MAX: Final = 4
READ_EVERY_S: Final = 1.0
# The agreement may wait for a long step, and the line for a slow file system.
RESULT_S_MAX: Final = 120.0


class Suspects(Protocol):
    """The watch that suspects slowdowns: slow nodes by host, and long steps, each with its time."""

    @property
    def slow(self) -> Mapping[str, tuple[SlowNode, float]]: ...

    @property
    def long_steps(self) -> tuple[LongSteps, float] | None: ...


class PairedTests:
    """The tests of an attempt. `ask` requests one. `slow` are the nodes that one proved slow."""

    def __init__(
        self,
        context: AgentContext,
        watch: Suspects,
        ask: Callable[[], None],
        journal: JournalWriter,
    ) -> None:
        self._context, self._watch, self._ask, self._journal = context, watch, ask, journal
        self._policy = context.request.health.slowdown
        self._proved: dict[str, int] = {}
        self._launch = self._known = self._tries = 0
        # `is_open`: a line about a link has to be followed by one about its end.
        self._has_pair = self._is_open = False
        # Nodes that only a test named: a line about each has to be followed by one about its end.
        self._found: dict[str, SlowNode] = {}
        self._asked_at: float | None = None
        self._due_at = self._read_at = 0.0

    def begin(self, launch: int) -> None:
        """Forget the tests of the last launch, because a new one starts."""
        self._launch, self._known, self._tries = launch, 0, 0
        self._proved, self._found, self._has_pair, self._is_open = {}, {}, False, False
        self._asked_at, self._due_at = None, 0.0

    @property
    def slow(self) -> Mapping[str, tuple[SlowNode, float]]:
        """The nodes that are proved slow, while the suspicion stands, and since when."""
        found, steps = dict[str, tuple[SlowNode, float]](), self._watch.long_steps
        for host, node in self._proved.items():
            if host in self._watch.slow:
                found[host] = self._watch.slow[host]
            elif steps is not None:
                found[host] = (self._slow_node(node, steps[0]), steps[1])
        return found

    def look(self, hosts: Sequence[str]) -> None:
        """Ask for a test if one is due, and judge its results. `hosts` are the nodes that train."""
        if self._policy not in {"ask", "act"} or len(hosts) < 2:
            return
        now = time.monotonic()
        if self._asked_at is not None:
            self._await_results(hosts, now)
            return
        if not self._watch.slow and self._watch.long_steps is None:
            self._proved, self._has_pair, self._tries = {}, False, 0
            self._close()
        elif now >= self._due_at and not self._is_explained:
            self._known = len(self._lines())
            self._asked_at = now
            self._due_at = now + GAP_S * 2 ** min(self._tries, DOUBLINGS_MAX)
            self._tries += 1
            self._ask()

    @property
    def _is_explained(self) -> bool:
        unproved = self._watch.slow.keys() - self._proved.keys()
        return not unproved and bool(self._proved or self._has_pair)

    def _lines(self) -> list[Event]:
        """Return the results of this launch. A journal that cannot be read has none for now."""
        attempt = self._context.attempt
        try:
            events = KEPT.read(attempt.rank_journal)
        except (OSError, HoldfastError):
            return []
        kind, place = EventKind.SLOWDOWN_TESTED, (attempt.number, self._launch)
        tested = [event for event in events if event.kind is kind]
        return [e for e in tested if (e.data.get("attempt"), e.data.get("launch")) == place]

    def _await_results(self, hosts: Sequence[str], now: float) -> None:
        assert self._asked_at is not None
        if now < self._read_at:
            return
        self._read_at = now + READ_EVERY_S
        if lines := self._lines()[self._known :]:
            self._asked_at = None
            results = PairedResults.from_facts(lines[-1].data)
            if results is not None and len(results.host_times) == len(hosts):
                self._record(judge(results), results.step, hosts)
        elif now > self._asked_at + RESULT_S_MAX:
            self._asked_at = None

    def _record(self, verdict: PairedVerdict, step: int, hosts: Sequence[str]) -> None:
        """Keep and journal what a test proved."""
        steps, begins = self._watch.long_steps, f"the test after step {step}"
        for node, proof in verdict.nodes.items():
            host = hosts[node]
            if host in self._watch.slow:
                self._proved[host] = node
                slow, text = self._watch.slow[host][0], f"{begins} confirms that {host} is slow"
                self._note_node(host, slow, f"{text}: {proof}")
            elif steps is not None:
                self._proved[host] = node
                text = f"{begins} finds that {host} is slow: {proof}"
                if node in verdict.working:
                    self._found[host] = slow = self._slow_node(node, steps[0])
                    self._note_node(host, slow, text, asks=self._policy == "ask")
                else:
                    self._note_link([host], steps[0], text)
        for (one, other), proof in verdict.pairs.items():
            if steps is None:
                continue
            self._has_pair, pair = True, [hosts[one], hosts[other]]
            text = f"{begins} finds a slow link between {' and '.join(pair)}: {proof}"
            self._note_link(pair, steps[0], f"{text}; it does not show which of them is the reason")
        refuted = self._watch.slow.keys() - self._proved.keys()
        if refuted or not (self._proved or self._has_pair):
            whom = (
                f"that {', '.join(sorted(refuted))} is slow" if refuted else "a slow node or link"
            )
            why = "the work, the data or the storage may be"
            self._append(EventKind.NOTE, text=f"{begins} does not confirm {whom}; {why} the reason")

    def _note_node(self, host: str, slow: SlowNode, text: str, *, asks: bool = False) -> None:
        self._append(
            EventKind.NODE_SLOW,
            host=host,
            ranks=list(slow.ranks),
            slow=slow.is_slow,
            excess=round(slow.excess, 3),
            cost_share=round(slow.cost, 3),
            asks=asks,
            text=text + drain_hint(host) if asks else text,
        )

    def _note_link(self, hosts: Sequence[str], steps: LongSteps, text: str) -> None:
        asks = self._policy == "ask"
        # Otherwise the watch journals the beginning and the end.
        self._is_open = self._is_open or not steps.all_wait
        hint = drain_hint(hosts[0]) if asks and len(hosts) == 1 else ""
        self._append(
            EventKind.LINK_SLOW,
            hosts=list(hosts),
            slow=True,
            excess=round(steps.excess, 3),
            asks=asks,
            text=text + hint,
        )

    def _close(self) -> None:
        """Journal the end of a slow node or link that the watch had not named."""
        for host, node in self._found.items():
            usual_node = replace(node, excess=0.0, cost=0.0, is_slow=False)
            self._note_node(host, usual_node, describe(usual_node, host, asks=False))
        self._found = {}
        if self._is_open:
            self._is_open = False
            usual = LongSteps(excess=0.0, all_wait=True, is_slow=False)
            text = describe_steps(usual, will_test=False)
            self._append(EventKind.LINK_SLOW, hosts=[], slow=False, asks=False, text=text)

    def _slow_node(self, node: int, steps: LongSteps) -> SlowNode:
        count = self._context.request.ranks_per_node
        ranks = tuple(range(node * count, (node + 1) * count))
        return SlowNode(node=node, ranks=ranks, excess=steps.excess, cost=steps.cost)

    def _append(self, kind: EventKind, **facts: Any) -> None:
        number = self._context.attempt.number
        self._journal.append(kind, attempt=number, launch=self._launch, **facts)
