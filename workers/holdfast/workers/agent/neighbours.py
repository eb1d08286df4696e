"""Node 0 tells each node which other node keeps copies of its snapshots."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.node import LedNode
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.decisions.neighbours import choose_neighbours


class Neighbours:
    """The neighbours of a launch. Does nothing without `checkpoint.neighbour`."""

    def __init__(
        self, context: AgentContext, group: NodeGroup, note: Callable[[str], object]
    ) -> None:
        """`note` journals a text."""
        self._context, self._group, self._note = context, group, note
        self._is_noted = False

    def begin(self, launch: int) -> None:
        """Tell all nodes their neighbours. They must have started the launch."""
        request = self._context.request
        if not request.checkpoint.neighbour or request.program.is_watched:
            return
        names = [node.name for node in self._group.nodes]
        if len(names) < 2:
            if not self._is_noted:
                self._note("unprotected: there is no other node to copy snapshots to")
            self._is_noted = True
            return
        holders = dict(zip(names, choose_neighbours(self._group.switches), strict=True))

        def protect(node: LedNode) -> Any | Future[Any]:
            return node.protect(launch, names.index(node.name), holders[node.name])

        self._group.ask_all(protect)
