"""A played job of several nodes: an agent for each, with the real code for terms and lost nodes.

Played are the ranks and the channel. A lead sees at its next turn that a node is gone, and a member
within a second that its lead is. What they then read, decide and write is real.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from tests.interleavings.agents import Agent, commit
from tests.interleavings.cluster import Job
from tests.interleavings.stage import Actor

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.workers.agent import leading, member
from holdfast.workers.agent.claim import claim, wait_for_claim
from holdfast.workers.agent.context import AgentContext, NodePlace, load_context, take_number
from holdfast.workers.agent.leading import build_outcome
from holdfast.workers.agent.losses import (
    events_of_leads,
    gone_numbers,
    launches_before,
    lost_of_launch,
    may_continue_without,
    plan_without,
    plan_without_drained,
    stop_of,
)
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.sources import StopRequest, StopWatch
from holdfast.workers.agent.succession import (
    FIRST,
    SupersededError,
    begin_term,
    leads,
    renew,
    step_back,
)
from holdfast.workers.decisions.drained_nodes import DrainPlan
from holdfast.workers.nodes.heartbeats import HeartbeatWriter

if TYPE_CHECKING:
    from tests.interleavings.world import World

TURN_S: Final = 5.0
NOTICED_S: Final = 1.0
KILL_S: Final = 1.0
JOIN_S: Final = 20.0


@dataclass
class JobOfNodes:
    """All nodes of one job, in the place of the job's `Agent`."""

    world: World
    job: Job
    nodes: list[PlayedNode] = field(default_factory=list)
    # By launch: the nodes that train together in it.
    launches: dict[int, tuple[PlayedNode, ...]] = field(default_factory=dict)
    ended_as: str = ""
    # Signals reach its nodes, see `signal`.
    signals: list[str] = field(default_factory=list)
    step: int = 0
    ends: str = ""
    is_waiting: bool = False
    # The nodes that left without being asked, and the leads that ended the attempt.
    finished: set[int] = field(default_factory=set)
    is_cancelled: bool = False
    state: str = ""

    @classmethod
    def start(cls, world: World, job: Job) -> tuple[JobOfNodes, Actor]:
        """Start the agent of every node of a job."""
        group = cls(world, job)
        group.nodes = [PlayedNode(group, n, host) for n, host in enumerate(job.hosts)]
        for node in group.nodes:
            node.actor = world.stage.add(f"{job.id} node {node.number}", node.run)
        return group, group.nodes[0].actor

    @property
    def whole(self) -> list[int]:
        """The launches in which every node trains: only these can make steps."""
        return [
            number
            for number, nodes in self.launches.items()
            if all(node.is_up and node.launch == number for node in nodes)
        ]

    @property
    def trains(self) -> bool:
        return bool(self.whole)

    def signal(self, name: str) -> None:
        """Signal all nodes, as Slurm does."""
        self.is_cancelled = True
        for node in self.nodes:
            if name == "SIGKILL":
                node.actor.is_killed = True
            elif node.is_up:
                node.signals.append(name)
        if name != "SIGKILL":
            self.look()

    def lose(self, number: int) -> None:
        """A node loses its power. With `--no-kill`, the job keeps the others."""
        node = self.nodes[number]
        node.actor.is_killed = True
        self.world.cluster.nodes[node.host].is_up = False

    def resume(self, number: int) -> None:
        """The operator lets jobs start on a drained node again."""
        self.world.cluster.nodes[self.nodes[number].host].drained = ""

    def drain(self, number: int) -> None:
        """The operator drains a node. It stays up."""
        self.world.cluster.nodes[self.nodes[number].host].drained = "bad_DIMM"

    def cut(self, number: int) -> None:
        """A node loses its connections to the others, and lives on."""
        self.nodes[number].is_cut = True

    def look(self) -> None:
        """End the job once no node is left, unless its batch shell was on a lost one."""
        if any(node.is_up for node in self.nodes):
            return
        if not self.nodes[0].actor.is_killed:
            self.world.cluster.end(self.job, self.state or "FAILED")
        elif self.is_cancelled:
            self.world.cluster.end(self.job, "CANCELLED by 0")


class PlayedNode:
    """The agent of one node. It is its own runtime, of which the real code sees the place."""

    actor: Actor

    def __init__(self, group: JobOfNodes, number: int, host: str) -> None:
        self.group, self.number, self.host = group, number, host
        self.signals: list[str] = []
        self.launch = 0
        self.heartbeat = SimpleNamespace(launch=0)
        self.place = NodePlace(node=number, nodes=0)
        self.is_cut, self.has_left, self.is_released = False, False, False
        # Whose lead it has joined.
        self.follows = -1

    @property
    def is_up(self) -> bool:
        is_over: bool = self.has_left or self.actor.is_killed
        return not is_over

    @property
    def is_training(self) -> bool:
        return bool(self.heartbeat.launch)

    def kill(self) -> None:
        self.launch = 0
        time.sleep(KILL_S)

    def drain(self, timeout_s: float, **_: object) -> bool:
        return True

    def note(self, text: str) -> None:
        """Do nothing: no decision reads notes."""

    def hears(self, other: PlayedNode) -> bool:
        is_cut: bool = self.is_cut or other.is_cut
        return other.is_up and not is_cut

    def run(self) -> None:
        """Claim or join, and take part until the attempt is over."""
        assert self.group.job.request is not None
        environment = {
            "SLURM_JOB_ID": self.group.job.id,
            "SLURM_PROCID": str(self.number),
            "SLURMD_NODENAME": self.host,
            "SLURM_STEP_NODELIST": ",".join(self.group.job.hosts),
        }
        context = load_context(self.group.job.request, environment)
        self.place = NodePlace(node=self.number, nodes=context.nodes)
        try:
            if self.number:
                self._follow(context)
                return
            with JournalWriter(context.attempt.node_journal(0)) as journal:
                if claim(context, journal):
                    PlayedLead(self, context, journal).run()
        finally:
            self.launch, self.has_left = 0, True
            self.group.look()

    def _follow(self, context: AgentContext) -> None:
        if not wait_for_claim(context):
            return
        self.follows = 0
        while not self.group.finished & {self.follows}:
            time.sleep(NOTICED_S)
            if self.is_released:
                return
            lead = self.group.nodes[self.follows]
            if self.hears(lead) or self.follows in self.group.finished:
                continue
            gone = ConnectionError("node 0 is gone")
            runtime = cast(NodeRuntime, self)
            found, host = member._without_lead(context, runtime, self.follows, gone)
            if found is None:
                return
            self.follows = found.node
            if found.node == self.number:
                with JournalWriter(context.attempt.node_journal(self.number)) as journal:
                    PlayedLead(self, context, journal).take_over(found.number, host)
                return


class PlayedLead:
    """Leads the nodes that follow one node. Its decisions and documents are those of the agent."""

    def __init__(self, node: PlayedNode, context: AgentContext, journal: JournalWriter) -> None:
        self.node, self.context, self.journal = node, context, journal
        self.group = node.group
        self.attempt = context.attempt.number
        self.size = context.nodes
        self.term, self.begun_term, self.is_successor = FIRST, FIRST, False
        self.members: list[PlayedNode] = []
        self.spares: list[PlayedNode] = []
        self.lost: list[str] = []
        self.stops = StopWatch(context, lambda: 1.0)
        self.stop: StopRequest | None = None
        self.began, self.first = time.time(), 0

    def run(self) -> None:
        """Lead from the claim on."""
        others = self.group.nodes[1:]
        self._await(others)
        self.members, self.spares = others[: self.size - 1], others[self.size - 1 :]
        self._lead(starts=True)

    def take_over(self, term: int, lost_host: str) -> None:
        """Lead from `term` on, as `Lead.take_over` does."""
        self.term, self.is_successor = term, True
        launch, self.size = self.node.heartbeat.launch, self.node.place.nodes
        events = events_of_leads(self.context.attempt)
        launches_before(events, launch)
        self._journal_end(launch)
        left = set(range(len(self.group.nodes))) - gone_numbers(events) - {self.node.number}
        nodes = [self.group.nodes[number] for number in sorted(left)]
        self._await(nodes)
        found = [one for one in nodes if self._has(one)]
        trained = [one for one in found if one.heartbeat.launch == launch]
        self.members = sorted(trained, key=lambda one: one.place.node)
        self.spares = [one for one in found if one not in trained]
        unjoined = [one.host for one in nodes if one not in found]
        missing = self.size - 1 - len(self.members)
        self.lost = lost_of_launch(missing, lead=lost_host, unjoined=unjoined, events=events)
        self.stop = stop_of(events)
        self._lead(starts=self.stop is None and self._rearranges())

    def _has(self, one: PlayedNode) -> bool:
        return one.follows == self.node.number and self.node.hears(one)

    def _await(self, nodes: list[PlayedNode]) -> None:
        give_up = time.monotonic() + JOIN_S
        while time.monotonic() < give_up and not all(map(self._has, nodes)):
            time.sleep(NOTICED_S)

    def _lead(self, *, starts: bool) -> None:
        try:
            with closing(HeartbeatWriter(self.context.attempt)) as beats:
                while starts and self.stop is None:
                    self._start()
                    plan = self._watch(beats)
                    starts = self.stop is None and self._continues(plan)
            self._end(self.stop)
        except SupersededError:
            self._end_launch()
        if (self.is_successor or self.lost) and leads(self.context):
            leading.end_job(self.context)

    def _begin_term(self) -> None:
        """Do what `Lead._begin_term` does."""
        if self.term == self.begun_term:
            return
        for one in self.members:
            if self._has(one):
                one.place = replace(one.place, term=self.term)
        begin_term(self.context, self.term)
        self.begun_term = self.term

    def _start(self) -> None:
        self._begin_term()
        launch = take_number(self.context.attempt)
        nodes = (self.node, *self.members)
        facts: dict[str, Any] = {"attempt": self.attempt, "launch": launch}
        self.journal.append(EventKind.LAUNCH_STARTED, **facts, world_size=len(nodes))
        for place, one in enumerate(nodes):
            if one is self.node or self._has(one):
                one.place = NodePlace(node=place, nodes=len(nodes), term=self.term)
                one.launch = one.heartbeat.launch = launch
        self.group.launches[launch] = nodes

    def _watch(self, beats: HeartbeatWriter) -> DrainPlan:
        """Train until a node is lost or a stop is requested, or until there are nodes to leave."""
        while True:
            beats.write([])
            time.sleep(TURN_S)
            self.group.step += 1
            if self._is_stopped():
                return DrainPlan()
            before = [*self.members, *self.spares]
            self.spares = [one for one in self.spares if self._has(one)]
            gone = [one for one in self.members if not self._has(one) or not one.launch]
            for one in gone:
                facts: dict[str, Any] = {"attempt": self.attempt, "node": one.number}
                facts["host"] = one.host
                self.journal.append(EventKind.NODE_LOST, **facts, detail="gone")
            if gone:
                self.lost = [one.host for one in gone]
                self._give_way(before)
                self.term = renew(self.context)
                self._end_launch()
                return DrainPlan()
            if (plan := self._departure()).way:
                # All ranks stop after the same step.
                self._end_launch("drained")
                return plan

    def _departure(self) -> DrainPlan:
        """Decide as `Departure.look` does, and let drained spare nodes go."""
        spares = [one.host for one in self.spares]
        plan = plan_without_drained(
            self.context,
            drained=self.stops.drained,
            training=[self.node.host, *(one.host for one in self.members)],
            spares=spares,
        )
        self._release(plan.released)
        return plan

    def _release(self, hosts: Collection[str]) -> None:
        for one in (*self.members, *self.spares):
            one.is_released = one.is_released or one.host in hosts
        self.spares = [one for one in self.spares if one.host not in hosts]

    def _continues(self, plan: DrainPlan) -> bool:
        """Decide on the next launch, as `Lead._depart` and `Lead._may_go_on` do."""
        if not plan.way:
            return self._rearranges()
        self._release(plan.leave)
        gone = [one.host for one in self.members if not self._has(one)]
        self.lost = list(dict.fromkeys([*plan.leave, *gone]))
        if gone:
            return self._rearranges()
        self.term = renew(self.context)
        self._take_places(plan.nodes)
        return True

    def _is_stopped(self) -> bool:
        """Look for a stop request, as `StopListener` does."""
        if self.node.signals:
            self.stop, _ = self.stops.from_signal(self.node.signals.pop(0), time.time())
        elif self.stop is None:
            self.stop = self.stops.from_file(time.time())
        return self.stop is not None

    def _give_way(self, before: list[PlayedNode]) -> None:
        """Do what `Lead._give_way` does, when nodes of `before` have fallen silent."""
        silent = sum(1 for one in before if not self._has(one))
        is_cut_off = silent > 1 + len(before) - silent
        if is_cut_off and may_continue_without(self.context, self.size, self.context.host):
            self.node.launch = 0
            step_back(self.context, self._is_stopped)

    def _end_launch(self, ending: str = "crashed") -> None:
        launch, self.node.launch = self.node.launch, 0
        for one in self.members:
            if self._has(one):
                one.launch = 0
        time.sleep(KILL_S)
        if launch:
            self._journal_end(launch, ending)

    def _journal_end(self, launch: int, ending: str = "crashed") -> None:
        facts: dict[str, Any] = {"attempt": self.attempt, "launch": launch}
        self.journal.append(EventKind.LAUNCH_ENDED, **facts, ending=ending, exit_code=None)

    def _rearranges(self) -> bool:
        """Decide on the next launch, as `Lead._may_go_on` and `NodeGroup.rearrange` do."""
        spares = len(self.spares)
        plan = plan_without(self.context, nodes=self.size, lost=self.lost, spares=spares)
        if not plan.way:
            return False
        self._take_places(plan.nodes)
        return True

    def _take_places(self, nodes: int) -> None:
        present = [one for one in self.members if one.host not in self.lost] + self.spares
        self.size = nodes
        self.members, self.spares = present[: nodes - 1], present[nodes - 1 :]
        self.lost = []

    def _end(self, stop: StopRequest | None) -> None:
        """Write the outcome and let the others leave. Raises `SupersededError`."""
        if stop is not None:
            self.journal.append(
                EventKind.SIGNAL,
                attempt=self.attempt,
                source=stop.source,
                name=stop.name,
                cause=stop.cause.value,
                deadline=stop.deadline,
                detail=stop.detail,
            )
            self._end_launch()
            commit(self.context, self.group.step)
        played = Agent(self.group.world.cluster, self.group.job, step=self.group.step)
        played.ended_as = "" if stop is not None else "crash"
        lead: Any = played._lead(self.context, stop, self.began, self.first)
        lost = tuple(self.lost)
        lead.bad_ending = lambda ended: ended.crash_report.classify(lost)
        leading._close(self.context, build_outcome(lead), self.journal)
        self.group.state = "COMPLETED" if stop is not None else "FAILED"
        self.group.finished.add(self.node.number)
