"""Whether every node can use the run's folder, and all of them see the same one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import real_folder
from holdfast.contracts.errors import MissingNodesError
from holdfast.contracts.states import Cause
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.node import LedNode
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.decisions import causes
from holdfast.workers.nodes import root_probe

CHECK: Final = "root"


class RootCheck:
    """`ending` is how the attempt ends because of the root, and `hosts` are to be excluded."""

    def __init__(self, context: AgentContext, group: NodeGroup, journal: JournalWriter) -> None:
        self.ending: causes.Ending | None = None
        self.hosts: tuple[str, ...] = ()
        self._context, self._group, self._journal = context, group, journal

    def passes(self) -> bool:
        """Check the root on all nodes together; return False if training must not start.

        The run's checkpoints may be on other storage, which is checked too.
        """
        run = self._context.run
        folders = [self._context.attempt.directory]
        if real_folder(run.checkpoints) != run.checkpoints:
            folders.append(run.checkpoints)
        found = [one for folder in folders for one in self._ask_all(folder)]
        for host, problem in found:
            self._journal.append(
                EventKind.NODE_UNHEALTHY,
                attempt=self._context.attempt.number,
                host=host,
                check=f"{CHECK}: {problem.lacks}",
                detail=problem.text,
            )
        if found:
            self.ending, self.hosts = root_ending(found, len(self._group.nodes))
        return not found

    def blame(self, error: MissingNodesError) -> bool:
        """End the attempt because of nodes that did not join; return False if none is at fault.

        If none of several nodes joins, node 0 or the network is at fault.
        """
        known, members = self._context.hosts, self._context.nodes_of_job - 1
        if len(known) != members + 1 or len(error.missing) == members > 1:
            return False
        self.hosts = tuple(known[number] for number in error.missing)
        which = f"{', '.join(self.hosts)} did not join, perhaps because the root is not mounted"
        self.ending = _ending(Cause.NODE_FAILURE, [f"{which}: {error}"])
        return True

    def _ask_all(self, folder: Path) -> list[tuple[str, root_probe.RootProblem]]:
        """Return the problems of all nodes with a folder of the run, each with its host."""
        place = str(folder.relative_to(self._context.run.directory))
        with contextlib.ExitStack() as stack:
            shared = None
            if len(self._group.nodes) > 1:
                # If this fails, node 0's own check says why.
                with contextlib.suppress(OSError):
                    shared = root_probe.SharedProbe(folder)
                    stack.callback(shared.close)
            name, token = (shared.folder.name, shared.token) if shared else ("", "")
            answers = self._group.ask_all(lambda node: node.check_root(place, name, token))
            found = [(node.name, problem) for node, problems in answers for problem in problems]
            if found or not shared:
                return found
            return [
                (self._context.host, problem) for problem in self._race(folder, f"{place}/{name}")
            ]

    def _race(self, folder: Path, shared: str) -> list[root_probe.RootProblem]:
        """Have some nodes create the same names at the same moment; return the problem, if any."""
        racers = {node.name for node in self._group.nodes[: root_probe.RACERS]}
        winners = []
        for number in range(root_probe.RACES):
            answers = self._group.ask_all(
                partial(_race, racers=racers, shared=shared, number=number)
            )
            winners.append(sum(has_won for _, has_won in answers))
        here = root_probe.describe(real_folder(folder))
        return [
            root_probe.RootProblem(one.lacks, f"{here}: {one.text}")
            for one in root_probe.judge_races(winners)
        ]


def _race(node: LedNode, racers: Collection[str], shared: str, number: int) -> bool | Future[bool]:
    return node.name in racers and node.race(shared, number)


def root_ending(
    found: Sequence[tuple[str, root_probe.RootProblem]], nodes: int
) -> tuple[causes.Ending, tuple[str, ...]]:
    """Return how an attempt of `nodes` nodes ends because of its root, and the hosts to exclude.

    The file system is wrong, and not a node, if all of several nodes lack the same, if no other
    node sees the lock of node 0, or if two nodes created the same name.
    """
    evidence = [
        f"{host} cannot use the root {one.text}" for host, one in found[: causes.EVIDENCE_MAX]
    ]
    counts = Counter(one.lacks for _, one in found)
    enough = {root_probe.LOCKS: nodes - 1, root_probe.NAMES: 1}
    if lacks := [name for name in counts if counts[name] >= enough.get(name, max(2, nodes))]:
        what = f"no node can use the root, which lacks {', '.join(lacks)}; {root_probe.ADVICE}"
        return _ending(Cause.USER_ERROR, [what, *evidence]), ()
    hosts = tuple(dict.fromkeys(host for host, _ in found))
    advice = f"correct the mount on {', '.join(hosts)}; meanwhile, other nodes are used"
    return _ending(Cause.NODE_FAILURE, [*evidence, advice]), hosts


def _ending(cause: Cause, evidence: Sequence[str]) -> causes.Ending:
    lines = tuple(line[: causes.LINE_CHARACTERS_MAX] for line in evidence)
    return causes.Ending(state=causes.STATE_OF_CAUSE[cause], cause=cause, evidence=lines)
