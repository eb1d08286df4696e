"""Node 0 tells each node which other node keeps copies of its snapshots, and of which step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.node import LedNode
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.decisions.neighbours import FACTOR_MAX, CopyState, RoundEnd, choose_neighbours

# The shortest time between two rounds.
PAUSE_S: Final = 1.0


class Neighbours:
    """The neighbours of a launch. Does nothing without `checkpoint.neighbour`."""

    def __init__(
        self,
        context: AgentContext,
        group: NodeGroup,
        journal: JournalWriter,
        step_s: Callable[[], float],
    ) -> None:
        """`step_s` returns the seconds of the last step."""
        self._context, self._group, self._journal = context, group, journal
        self._step_s = step_s
        self._is_noted = False
        self._launch, self._nodes = 0, 0
        self._state = CopyState()
        self._began = 0.0

    def begin(self, launch: int) -> None:
        """Tell all nodes their neighbours. They must have started the launch."""
        request = self._context.request
        self._launch, self._nodes = launch, 0
        if not request.checkpoint.neighbour or request.program.is_watched:
            return
        names = [node.name for node in self._group.nodes]
        if len(names) < 2:
            self._note_once("there is no other node to copy snapshots to")
            return
        places = {name: place for place, name in enumerate(names)}
        holders = choose_neighbours(self._group.switches)

        def protect(node: LedNode) -> object:
            place = places[node.name]
            return node.protect(launch, place, holders[place])

        self._group.ask_all(protect)
        self._nodes, self._state, self._began = len(names), CopyState(), time.monotonic()

    def look(self) -> None:
        """Begin the next round once all nodes have ended the present one. Never waits."""
        group = self._group
        reports = list(group.reports.values())
        now = time.monotonic()
        if not self._nodes or len(reports) < self._nodes or now - self._began < self._pause_s:
            return
        here = (self._launch, self._state.number)
        if any((r.copied.launch, r.copied.number) != here for r in reports):
            return
        ends = [RoundEnd(step=r.copied.step, is_missed=r.copied.is_missed) for r in reports]
        ended = self._state.after(ends)
        if ended.factor == FACTOR_MAX:
            self._note_once("the steps are too short for the nodes to copy the same one")
        newest = max(report.completed for report in reports)
        self._state = ended.next(newest, self._step_s(), group.poll_s)
        self._began = now
        for node in reversed(group.nodes):
            node.copy(self._launch, self._state.number, self._state.keep)

    @property
    def _pause_s(self) -> float:
        return max(PAUSE_S, self._group.poll_s)

    def _note_once(self, problem: str) -> None:
        if not self._is_noted:
            self._journal.append(
                EventKind.NOTE,
                attempt=self._context.attempt.number,
                launch=self._launch,
                text=f"unprotected: {problem}",
                unprotected=problem,
            )
        self._is_noted = True
