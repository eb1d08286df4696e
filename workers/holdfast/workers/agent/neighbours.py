"""What protects an attempt against the loss of a node, as node 0 directs and reports it.

It tells each node which other node keeps copies of its snapshots, and of which step. The journal
has what is lacking: copies, or spare nodes once all have been used.
"""

from __future__ import annotations

import time
from typing import Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.records import protection
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.node import LedNode
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.decisions.neighbours import FACTOR_MAX, CopyState, RoundEnd, choose_neighbours

# The shortest time between two rounds.
PAUSE_S: Final = 1.0
# If so many checkpoints are committed during a round, the newest one is newer than its copy.
COMMITS_MAX: Final = 2


class Neighbours:
    """The neighbours of a launch, if `checkpoint.neighbour` is set, and its spare nodes."""

    def __init__(
        self,
        context: AgentContext,
        group: NodeGroup,
        journal: JournalWriter,
        here: NodeRuntime,
    ) -> None:
        self._context, self._group, self._journal, self._here = context, group, journal, here
        number = context.attempt.number
        self._copies, self._spares = (
            protection.ProtectionNotes(one, number)
            for one in (protection.COPIES, protection.SPARES)
        )
        self._launch, self._nodes = 0, 0
        self._state = CopyState()
        self._began, self._commits = 0.0, 0

    def begin(self, launch: int) -> None:
        """Tell all nodes their neighbours. They must have started the launch."""
        request = self._context.request
        self._launch, self._nodes = launch, 0
        self._look_at_spares()
        if not request.checkpoint.neighbour or request.program.is_watched:
            return
        names = [node.name for node in self._group.nodes]
        if len(names) < 2:
            if request.nodes > 1 or request.checkpoint.neighbour is True:
                self._note(self._copies, protection.NO_OTHER_NODE)
            return
        places = {name: place for place, name in enumerate(names)}
        holders = choose_neighbours(self._group.switches)

        def protect(node: LedNode) -> object:
            place = places[node.name]
            return node.protect(launch, place, holders[place])

        self._group.ask_all(protect)
        self._nodes, self._state, self._began = len(names), CopyState(), time.monotonic()
        self._commits = self._here.commits

    def look(self) -> None:
        """Begin the next round once all nodes have ended the present one. Never waits."""
        self._look_at_spares()
        group = self._group
        reports = list(group.reports.values())
        now = time.monotonic()
        if not self._nodes or len(reports) < self._nodes or now - self._began < self._pause_s:
            return
        here = (self._launch, self._state.number)
        if any((r.copied.launch, r.copied.number) != here for r in reports):
            if self._here.commits - self._commits >= COMMITS_MAX:
                self._note(self._copies, protection.SLOW_COPIES)
            return
        ends = [RoundEnd(step=r.copied.step, is_missed=r.copied.is_missed) for r in reports]
        ended = self._state.after(ends)
        if ended.factor == FACTOR_MAX:
            self._note(self._copies, protection.SHORT_STEPS)
        elif ended.factor == 1 and self._here.commits - self._commits < COMMITS_MAX:
            self._note(self._copies, "")
        self._commits = self._here.commits
        newest = max(report.completed for report in reports)
        self._state = ended.next(newest, self._here.step_s, group.poll_s)
        self._began = now
        for node in reversed(group.nodes):
            node.copy(self._launch, self._state.number, self._state.keep)

    @property
    def _pause_s(self) -> float:
        return max(PAUSE_S, self._group.poll_s)

    def _look_at_spares(self) -> None:
        group, problem = self._group, ""
        if self._context.request.spare_nodes and not group.spares:
            gone = ", ".join([*group.dropped, *group.lost])
            problem = f"no spare node is left; lost or left: {gone}"
        self._note(self._spares, problem)

    def _note(self, notes: protection.ProtectionNotes, problem: str) -> None:
        if facts := notes.change(self._launch, problem):
            self._journal.append(EventKind.PROTECTION, **facts)
