"""One run on the stage: its folder, its cluster, its agents and its supervisors."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from tests.interleavings.agents import Agent
from tests.interleavings.cluster import Cluster, Job, Node
from tests.interleavings.hooks import Hooks, installed
from tests.interleavings.several_nodes import JobOfNodes
from tests.interleavings.stage import Actor, Stage, current

from holdfast.cli import operate
from holdfast.contracts.disk.journal_follow import KEPT
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records import history_cache
from holdfast.contracts.records.history import RunHistory, load_history
from holdfast.contracts.records.supervision import is_supervised
from holdfast.flows.parameters import load_spec
from holdfast.flows.supervisor import service
from holdfast.flows.supervisor.carry import carry
from holdfast.workers.checkpoints import deletion
from holdfast.workers.runs import operator, run_folders
from holdfast.workers.schedulers import slurm_client

POLL_S: Final = 10.0
CYCLE_S: Final = 5.0
# Long enough for everything that a run waits for, and far shorter than an hour.
HORIZON_S: Final = 900.0
# Nothing may change for this long before a run counts as calm.
CALM_S: Final = 2.5 * POLL_S
NAME: Final = "r"
LOG: Final = logging.getLogger("holdfast.interleavings")
LOG.disabled = True
LOG.propagate = False

_GROWS: Final = {"elastic": {"min_gpus": 4, "max_gpus": 16, "grow": True, "grow_after_s": 1}}
_FALLS_BACK: Final = {"resources": {"fallbacks": [{"partition": "other", "after_min": 0.01}]}}
FLAVOURS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "grow": _GROWS,
    "fallback": _FALLS_BACK,
    "both": {**_GROWS, **_FALLS_BACK},
    # A successor waits in the queue while an attempt runs. No other size may be used.
    "standby": {"resources": {"standby": "successor"}, "elastic": {}},
    # Slurm restarts the job after a node failure. No other size may be used.
    "expedite": {"resources": {"standby": "expedite"}, "elastic": {}},
    # Jobs of several nodes, each with its agent, see `several_nodes.py`.
    "spares": {"resources": {"nodes": 2, "spare_nodes": 2}, "elastic": {}},
    "shrinks": {"resources": {"nodes": 4}},
    # It uses every node of its partition, and no other size.
    "whole": {"resources": {"nodes": 4}, "elastic": {}},
}
# The flavours whose jobs have an agent on each node.
OF_NODES: Final = frozenset({"spares", "shrinks"})


def spec_of(flavour: str, folder: Path) -> dict[str, Any]:
    """Return the run's spec in one of its flavours. `folder` is the program's, and empty."""
    own = FLAVOURS[flavour]
    resources = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4, "partition": "main"}
    return {
        "name": NAME,
        "command": ["t.py"],
        "launch": {"working_directory": str(folder)},
        "resources": {**resources, **own.get("resources", {})},
        "elastic": own.get("elastic", {"min_gpus": 4, "max_gpus": 16}),
        "supervision": {"poll_s": POLL_S, "backoff_s": 0, "heartbeat_s": 30, "grace_s": 30},
        "checkpoint": {"keep": {"last": 1}},
    }


class NoIndex:
    """An index that takes everything and keeps nothing: no decision needs it."""

    def update(self, paths: RunPaths) -> None:
        """Do nothing."""


class ReadersOfProcesses:
    """Gives each actor its own readers of histories, because each is a process."""

    def __init__(self) -> None:
        self._known: dict[int, history_cache._Readers] = {}

    @property
    def _mine(self) -> history_cache._Readers:
        return self._known.setdefault(id(current()), history_cache._Readers())

    def share(self, directory: Path, reader: history_cache.HistoryReader) -> None:
        self._mine.share(directory, reader)

    def of(self, directory: Path) -> history_cache.HistoryReader:
        return self._mine.of(directory)


class PlayedEvent:
    """An event that nobody sets; a wait for it passes virtual time."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def wait(self, seconds: float) -> bool:
        self._stage.sleep(seconds)
        return False

    def is_set(self) -> bool:
        return False


class PlayedThread:
    """A thread of the supervisor service."""

    def __init__(self, world: World, target: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._world, self._work = world, partial(target, *args)
        self._actor: Actor | None = None

    def start(self) -> None:
        world = self._world
        name = f"stays{len(world.supervisors) + 1}"
        self._actor = world.stage.add(name, self._work, world.ahead_s.get("supervisors", 0.0))
        world.supervisors.append(self._actor)

    def is_alive(self) -> bool:
        return self._actor is not None and not self._actor.has_ended


@dataclass(frozen=True)
class Situation:
    """A run's folder and cluster at a moment, from which many schedules start."""

    name: str
    flavour: str
    folder: Path
    now: float
    nodes: dict[str, Node]
    jobs: dict[str, Job]
    # By job: the step of each agent that trains.
    training: dict[str, int]


class World:
    """A stage with one run, restored from a situation or new."""

    def __init__(self, base: Path, start: float) -> None:
        self.base = base
        self.root, self.home = base / "runs", base / "home"
        self.paths = RunPaths(self.root / NAME)
        self.stage = Stage(start)
        self.cluster = Cluster(self.stage, self._start_agent, self._signal_agent)
        self.agents: dict[str, tuple[Agent | JobOfNodes, Actor]] = {}
        self.supervisors: list[Actor] = []
        self.hooks = Hooks(self.root, self.cluster.run, self.start_supervisor)
        self.hooks.stage = self.stage
        # By how much the clocks are ahead: of `orders`, of `supervisors` and of `nodes`.
        self.ahead_s: dict[str, float] = {}
        self.broken: list[str] = []
        # Orders that were made on the stage, with their actors, and the checkpoints pinned.
        self.orders: list[tuple[str, Actor]] = []
        self.pins: list[tuple[str, Actor]] = []
        # The name of the situation in which the schedule began.
        self.started_as = self.flavour = ""
        self.services: list[Actor] = []
        self.has_killed = False
        self.stage.add("slurmctld", self._cycle)

    # --- processes ----------------------------------------------------------------------

    def _cycle(self) -> None:
        """The controller's loop."""
        while True:
            self.stage.sleep(CYCLE_S)
            self.cluster.schedule()

    def _start_agent(self, job: Job) -> None:
        if self.flavour in OF_NODES:
            self.agents[job.id] = JobOfNodes.start(self, job)
        else:
            self.add_agent(job)

    def add_agent(self, job: Job, step: int | None = None) -> Agent:
        """Start the agent of a job, or the one that trained when the situation was recorded."""
        agent = Agent(self.cluster, job, step=step or 0, trains=step is not None)

        def work() -> None:
            agent.run()

        actor = self.stage.add(f"job {job.id}", work, self.ahead_s.get("nodes", 0.0))
        self.agents[job.id] = agent, actor
        return agent

    def _signal_agent(self, job: Job, name: str) -> None:
        if job.id not in self.agents:
            return
        agent, actor = self.agents[job.id]
        if isinstance(agent, JobOfNodes):
            agent.signal(name)
        elif name == "SIGKILL":
            actor.is_killed, agent.trains = True, False
        elif agent.is_waiting:
            # It handles no signal yet.
            actor.is_killed, agent.is_waiting = True, False
            self.cluster.end(job, "CANCELLED by 0")
        else:
            agent.signals.append(name)

    def start_supervisor(self) -> Actor:
        """Start the process that `holdfast.flows.detached` is."""
        name = f"supervisor{len(self.supervisors) + 1}"
        actor = self.stage.add(name, self._supervise, self.ahead_s.get("supervisors", 0.0))
        self.supervisors.append(actor)
        return actor

    def _supervise(self) -> RunHistory:
        return carry(self.paths, LOG, NoIndex())  # type: ignore[arg-type]

    def stay(self) -> Actor:
        """Start `holdfast supervise --stay`; the thread of each run is an actor too."""
        one = service.SupervisorService(self.root, NoIndex(), LOG)  # type: ignore[arg-type]
        one.stop = PlayedEvent(self.stage)  # type: ignore[assignment]
        actor = self.stage.add("stay", one.run, self.ahead_s.get("supervisors", 0.0))
        self.services.append(actor)
        return actor

    def kill_supervisors(self) -> None:
        """End every supervisor, and every service, as SIGKILL does."""
        for actor in (*self.supervisors, *self.services):
            self.has_killed |= not actor.has_ended
            actor.is_killed = True

    @property
    def lacks_supervisor(self) -> bool:
        """True if none has come yet, or those that came were killed."""
        came = [*self.supervisors, *self.services]
        return not came or (self.has_killed and all(one.is_killed or one.has_ended for one in came))

    def _thread(self, target: Callable[..., object], args: tuple[Any, ...], **_: object) -> Any:
        """Return a thread of the service, which is a supervisor like any other."""
        return PlayedThread(self, target, args)

    def order(
        self, action: operator.Action, gpus: int | None = None, *, now: bool = False
    ) -> Actor:
        """Add the process of one of `holdfast relaunch|stop|pause|resume|cancel`."""

        def work() -> object:
            return operate._ask_run(self.paths, action, gpus, reason="", now=now)

        actor = self.stage.add(f"{action}{len(self.orders) or ''}", work, self._of_orders)
        self.orders.append((action, actor))
        return actor

    def oldest_checkpoint(self) -> str:
        return str(self.paths.list_checkpoint_names()[0])

    @property
    def _of_orders(self) -> float:
        return self.ahead_s.get("orders", 0.0)

    def pin(self) -> Actor:
        """Add the process of `holdfast pin` for the oldest checkpoint."""
        name = self.oldest_checkpoint()
        actor = self.stage.add(
            "pin", lambda: operator.pin(self.paths, name, by="alice"), self._of_orders
        )
        self.pins.append((name, actor))
        return actor

    def unpin(self) -> Actor:
        """Add the process of `holdfast unpin` for the oldest checkpoint."""
        name = self.oldest_checkpoint()
        return self.stage.add(
            "unpin", lambda: operator.unpin(self.paths, name, by="alice"), self._of_orders
        )

    def prune(self) -> Actor:
        """Add the process of `holdfast prune`."""
        return self.stage.add(
            "prune",
            lambda: deletion.prune(self.paths, by="alice", dry_run=False),
            self._of_orders,
        )

    # --- situations ---------------------------------------------------------------------

    def create(self, flavour: str) -> None:
        """Create the run and its nodes."""
        self.flavour = flavour
        for number in range(1, 5):
            self.cluster.nodes[f"n{number}"] = Node(f"n{number}", "main")
        for number in range(1, 3):
            self.cluster.nodes[f"m{number}"] = Node(f"m{number}", "other")
        program = self.base / "program"
        program.mkdir()
        run_folders.attach_or_create(
            load_spec(spec_of(flavour, program)), self.root, created_by="alice"
        )

    def record(self, name: str, flavour: str, folder: Path) -> Situation:
        """Record the present moment."""
        shutil.copytree(self.base, folder, symlinks=True)
        live = {j: a.step for j, (a, _) in self.agents.items() if a.trains}
        return Situation(
            name,
            flavour,
            folder,
            self.stage.now,
            copy.deepcopy(self.cluster.nodes),
            copy.deepcopy(self.cluster.jobs),
            live,
        )

    def restore(self, situation: Situation) -> None:
        """Continue from a recorded moment; the agents that trained train."""
        self.cluster.nodes = copy.deepcopy(situation.nodes)
        self.cluster.jobs = copy.deepcopy(situation.jobs)
        for job_id, step in situation.training.items():
            self.add_agent(self.cluster.jobs[job_id], step)
        for _, actor in self.agents.values():
            # Until its first sleep, which is where it was.
            self.stage.run(actor)

    # --- looks --------------------------------------------------------------------------

    def history(self) -> RunHistory:
        return load_history(self.paths)

    @property
    def has_supervisor(self) -> bool:
        return is_supervised(self.paths.flow_lock) is True

    @property
    def live_jobs(self) -> list[Job]:
        return [job for job in self.cluster.jobs.values() if job.is_live]

    def is_adopted(self, job: Job) -> bool:
        """Return True for a job that runs an attempt, or is to run one."""
        return job.id in {one.job_id for one in self.history().attempts}

    @property
    def trainers(self) -> list[Agent | JobOfNodes]:
        return [agent for agent, _ in self.agents.values() if agent.trains]

    def watch(self) -> None:
        """Note what must never be, at any moment."""
        trainers = [agent.job.id for agent in self.trainers]
        if len(trainers) > 1:
            self._break(f"two live jobs: {', '.join(trainers)} train at once")
        for agent in self.trainers:
            if isinstance(agent, JobOfNodes) and len(agent.whole) > 1:
                self._break(f"two launches of job {agent.job.id} train at once: {agent.whole}")

    def _break(self, text: str) -> None:
        if text not in self.broken:
            self.broken.append(text)

    def leave_at(self, delay_s: float) -> None:
        """Other users' jobs leave the cluster after a while, and lost nodes are repaired."""

        def work() -> None:
            self.stage.sleep(delay_s)
            for node in self.cluster.nodes.values():
                node.taken, node.is_up = 0, True

        self.stage.add("others", work)

    def wait_until_calm(self, is_calm: Callable[[], bool], horizon_s: float = HORIZON_S) -> bool:
        """Let time pass until the run has been calm for a while; False if it never is."""
        limit, calm_since, looked_at, lines = self.stage.now + horizon_s, None, 0.0, 0
        calm = False
        while self.stage.tick(limit):
            self.watch()
            if self.stage.now - looked_at < CYCLE_S:
                continue
            looked_at = self.stage.now
            if lines != len(self.stage.trace):
                lines, calm = len(self.stage.trace), is_calm()
            if not calm:
                calm_since = None
            elif calm_since is None:
                calm_since = self.stage.now
            elif self.stage.now - max(calm_since, self.cluster.silent_until) >= CALM_S:
                return True
        return is_calm()


@contextmanager
def world_at(base: Path, start: float, situation: Situation | None = None) -> Iterator[World]:
    """Yield a world in an empty folder, or as it was in a situation."""
    shutil.rmtree(base, ignore_errors=True)
    if situation is None:
        base.mkdir(parents=True)
    else:
        shutil.copytree(situation.folder, base, symlinks=True)
        start = situation.now
    KEPT._kept.clear()
    KEPT._bytes = 0
    slurm_client._cluster_name.cache_clear()
    world = World(base, start)
    world.home.mkdir(exist_ok=True)
    before = os.environ.get("HOLDFAST_HOME")
    os.environ["HOLDFAST_HOME"] = str(world.home)
    try:
        threads = SimpleNamespace(Thread=world._thread, Event=threading.Event)
        with (
            installed(world.hooks),
            mock.patch.object(service, "threading", threads),
            mock.patch.object(history_cache, "_READERS", ReadersOfProcesses()),
        ):
            if situation is not None:
                world.restore(situation)
            try:
                yield world
            finally:
                world.stage.close()
    finally:
        if before is None:
            del os.environ["HOLDFAST_HOME"]
        else:
            os.environ["HOLDFAST_HOME"] = before
