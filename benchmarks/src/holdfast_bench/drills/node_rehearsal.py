"""Losses of nodes, each rehearsed on a separate job that has four nodes.

The job continues in the same attempt. Its steps are compared bit for bit with an uninterrupted run:
at the same size, or at the size that the job had after a loss, from the step that it resumed from.

A job has an agent for each node on this machine, started as Slurm starts it. The agents, flushers,
torchruns and ranks are real. There is no controller and no supervisor: the commands of Slurm fail,
as while its controller is away. So the job has one attempt, which must continue in place.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.environment import STANDBY_PIPE
from holdfast.contracts.errors import HoldfastError, ServiceError
from holdfast.contracts.node.flusher_process import MODULE
from holdfast.contracts.records.documents import Outcome, newest_term, read_document, write_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import Cause
from holdfast.workers.runs.attempts import reserve
from holdfast.workers.runs.request import build_request
from holdfast.workers.runs.run_folders import create_run, read_record
from holdfast_bench.drills.node_steps import NODES, Sizes, compare_steps
from holdfast_bench.drills.replica_memory import damage_copies, pages_of
from holdfast_bench.drills.steps import RecordedRun, Records
from holdfast_bench.drills.testbed import KEEP_LAST, PROGRAM, STEPS_UNBOUNDED, UNLIMITED, Testbed
from holdfast_bench.live_drills import invariants, process_list
from holdfast_bench.live_drills.invariants import Broken
from holdfast_bench.live_drills.kinds import Kind, Loss, Recovery
from holdfast_bench.live_drills.lost_nodes import freeze, kill_all, processes_on
from holdfast_bench.live_drills.process_list import LaunchPlace, place_of
from holdfast_bench.live_drills.results import DrillResult, FaultResult
from holdfast_bench.live_drills.runner import MOMENT_S_MAX, Tell
from holdfast_bench.live_drills.target_run import ProgressMark

SMALLER: Final = 2
STEP_S: Final = 0.1
# A copy begins at most once a second. So each snapshot gets one.
SNAPSHOT_STEPS: Final = 20
INTERVAL_STEPS: Final = 40
# With copies, only they have what is newer than this.
RARE_INTERVAL_STEPS: Final = 200
SILENCE_S: Final = {"train": 30.0}
# The newest snapshot counts once its copy has arrived. Until then, the one before it counts.
LOSS_STEPS: Final = {Loss.CHECKPOINT: 2 * INTERVAL_STEPS, Loss.COPY: 2 * SNAPSHOT_STEPS}
COPIED_STEPS: Final = 3 * SNAPSHOT_STEPS
WARM_S_MAX: Final = 120.0
WARM_LOOK_S: Final = 1.0
QUIET_LOOKS: Final = 3
QUIET_LOOK_S: Final = 0.3
DAMAGED: Final = "is damaged in memory and is not used"
LOST_TEXT_MAX: Final = 160
AGENT: Final = "holdfast.workers.agent.main"
COMMANDS: Final = ("scontrol", "squeue", "sacct", "scancel", "sinfo")
JOB_ID: Final = "1"
KILL_WAIT_S: Final = 30.0
END_S: Final = 120.0


class NodeJob:
    """The only attempt of a new run under `root`, on nodes n0, n1, …, with the spec's spare ones.

    All its processes are killed when the `with` block is left.
    """

    def __init__(
        self, spec: RunSpec, root: Path, folder: Path, environment: Mapping[str, str]
    ) -> None:
        """`folder` is for the commands and the agents' output."""
        self.spec = spec
        self.paths = create_run(spec, root, created_by="drill")
        self.attempt = self._reserve()
        self.folder, self._environment = folder, environment
        self._commands = _failing_commands(Path(tempfile.mkdtemp(prefix="bin-", dir=folder)))
        self._agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        count = self.spec.resources.nodes + self.spec.resources.spare_nodes
        self._agents = [self._start(node) for node in range(count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node, agent in enumerate(self._agents):
            if agent.poll() is None:
                self.kill(node)

    @property
    def lead(self) -> int:
        """The number of the node whose agent leads the attempt."""
        term = newest_term(self.attempt)
        return 0 if term is None else term.node

    @property
    def owners(self) -> list[psutil.Process]:
        """The agents that still run."""
        return [psutil.Process(one.pid) for one in self._agents if one.poll() is None]

    def processes_on(self, node: int) -> list[psutil.Process]:
        """Return all processes of a node, its agent first."""
        agent = self._agents[node]
        below = processes_on(self.paths, _name(node))
        above = [psutil.Process(agent.pid)] if agent.poll() is None else []
        return [*above, *(one for one in below if one.pid != agent.pid)]

    def kill(self, *nodes: int) -> int:
        """Kill everything on some nodes at the same time; return the number of processes."""
        found = [process for node in nodes for process in self.processes_on(node)]
        kill_all(found)
        for node in nodes:
            self._agents[node].wait(KILL_WAIT_S)
        return len(found)

    def stop(self) -> None:
        """Stop the attempt as Slurm does at a preemption. Raises `ServiceError` if it stays."""
        self._agents[self.lead].send_signal(signal.SIGTERM)
        for node, agent in enumerate(self._agents):
            try:
                agent.wait(END_S)
            except subprocess.TimeoutExpired:
                text = f"{self.paths.name}: the agent of node {node} had not ended within "
                raise ServiceError(f"{text}{END_S:.0f} s") from None

    def _reserve(self) -> AttemptPaths:
        attempt, resources = reserve(self.paths, 1), self.spec.resources
        assert attempt is not None, "the run is new"
        gpus = resources.nodes * resources.size_per_node
        record = read_record(self.paths)
        request = build_request(record, self.spec, attempt=1, gpus=gpus, reason="a drill")
        write_document(attempt.request, request)
        return attempt

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        variables = {
            "SLURM_PROCID": str(node),
            "SLURM_JOB_ID": JOB_ID,
            "SLURMD_NODENAME": _name(node),
            "PATH": f"{self._commands}:{os.environ['PATH']}",
        }
        with open(self.folder / f"agent-{node}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", AGENT, str(self.attempt.request)],
                env={**self._environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _name(node: int) -> str:
    return f"n{node}"


def _failing_commands(folder: Path) -> Path:
    for name in COMMANDS:
        path = folder / name
        path.write_text("#!/bin/sh\necho 'no controller' >&2\nexit 1\n")
        with contextlib.suppress(OSError):
            path.chmod(0o755)
    return folder


@dataclass(frozen=True, kw_only=True)
class NodeLoss:
    """A loss of nodes, and how the job continued. Seconds count from the loss."""

    nodes: tuple[int, ...]
    mark: ProgressMark
    killed_at: float
    started: Event
    resumed: int
    steps_lost: int
    first_step_s: float
    warm: int
    load: float

    def __str__(self) -> str:
        names = " and ".join(f"n{node}" for node in self.nodes)
        return (
            f"{names} killed at step {self.mark.step}: {self.started.data.get('way')}, "
            f"{self.started.data.get('world_size')} ranks from step {self.resumed}, "
            f"{self.steps_lost} steps lost, first new step after {self.first_step_s:.1f} s "
            f"({self.warm} warm standbys, load {self.load:.1f})"
        )


class NodeRehearsal:
    """Rehearses one fault on a separate job, and adds the outcome to `result`."""

    def __init__(
        self, testbed: Testbed, chance: random.Random, result: DrillResult, url: str, tell: Tell
    ) -> None:
        self._testbed, self._chance = testbed, chance
        self._result, self._url, self._tell = result, url, tell
        self._losses: list[NodeLoss] = []
        self._details: list[str] = []

    def rehearse(self, kind: Kind, is_cut: Callable[[], bool]) -> tuple[FaultResult, RunPaths]:
        """Make a job, rehearse the fault on it, and end the job. Return its run, too.

        Raises `Cut` as soon as `is_cut` returns True.
        """
        began, testbed = time.monotonic(), self._testbed
        name = testbed.new_job()
        records, agents = testbed.records_of(name), testbed.agents_of(name)
        records.mkdir()
        agents.mkdir()
        spec = _spec(kind, name, testbed, records)
        self._job = job = NodeJob(spec, testbed.root, agents, testbed.environment)
        self._target = RecordedRun(paths=job.paths, records=Records(records), is_cut=is_cut)
        broken: list[Broken] = []
        with job:
            try:
                broken += SCENARIOS[kind.name](self, kind)
                broken += self._check(job.owners)
                job.stop()
                broken += self._check_end()
            except (HoldfastError, OSError, psutil.Error) as error:
                broken.append(Broken(invariants.RECOVERS, f"{kind.name}: {error}"))
        broken += self._check([])
        broken += self._compare()
        broken = list(dict.fromkeys(broken))
        self._result.broken += broken
        return self._record(kind, broken, time.monotonic() - began), job.paths

    # --- scenarios ----------------------------------------------------------------------

    def lose_to_spare(self, kind: Kind) -> Iterator[Broken]:
        """Kill any of the nodes that train. The spare node takes its place."""
        node = self._chance.randrange(NODES)
        loss = self._lose(kind, node)
        yield from self._judge(kind, loss, way="spare", ranks=NODES)

    def shrink(self, kind: Kind) -> Iterator[Broken]:
        """Kill any of the nodes. The largest smaller size continues."""
        loss = self._lose(kind, self._chance.randrange(NODES))
        yield from self._judge(kind, loss, way="shrink", ranks=SMALLER)

    def lose_neighbours(self, kind: Kind) -> Iterator[Broken]:
        """Kill a node, and then two that are neighbours. A spare node replaces the first."""
        node = 1 + self._chance.randrange(NODES - 1)
        loss = self._lose(kind, node, after_steps=COPIED_STEPS)
        yield from self._judge(kind, loss, way="spare", ranks=NODES)
        if loss.resumed not in self._salvaged(loss) and not self._was_saved(loss):
            text = f"resumed at {loss.resumed}, which no neighbour's copy was committed for"
            yield Broken(invariants.RECOVERS, f"{kind.name}: {text}")
        places = [*range(NODES)]
        places[node] = NODES
        # Each node's copies are at the next place.
        first = 1 + self._chance.randrange(NODES - 2)
        pair = self._lose(
            kind, places[first], places[first + 1], after=loss, after_steps=COPIED_STEPS
        )
        yield from self._judge(kind, pair, way="shrink", ranks=SMALLER, is_bounded=False)
        if salvaged := self._salvaged(pair):
            text = f"steps {salvaged} were committed without the part of a node"
            yield Broken(invariants.RECOVERS, f"{kind.name}: {text}")
        failed = self._target.events_of(EventKind.SAVE_FAILED, pair.killed_at)
        texts = [str(event.data.get("error")) for event in failed]
        named = [text for text in texts if "are lost" in text]
        if not named:
            text = f"expected a report of what was lost, got {texts or 'none'}"
            yield Broken(invariants.RECOVERS, f"{kind.name}: {text}")
        self._details += [text[:LOST_TEXT_MAX] for text in named[:1]]

    def damage_replica(self, kind: Kind) -> Iterator[Broken]:
        """Damage the copies of a node while it stands still, then kill it."""
        node = 1 + self._chance.randrange(NODES - 2)
        holder = node + 1
        damaged: list[int] = []

        def damage() -> None:
            # A copy that arrives later would be intact: that of a node that still runs, or what
            # is on its way.
            owner, keeps = self._flusher(node), self._flusher(holder)
            freeze(self._job.processes_on(node))
            # It stands still, so one look is enough. The node counts as lost after half a minute.
            owned, quiet = pages_of(owner), 0
            while quiet < QUIET_LOOKS:
                damaged.append(damage_copies(owned, keeps))
                quiet = 0 if damaged[-1] else quiet + 1
                time.sleep(QUIET_LOOK_S)

        loss = self._lose(kind, node, after_steps=COPIED_STEPS, before=damage)
        yield from self._judge(kind, loss, way="spare", ranks=NODES)
        self._details.append(f"a byte inverted in {sum(damaged)} pages of the copies at n{holder}")
        if salvaged := self._salvaged(loss):
            text = f"steps {salvaged} were committed from damaged copies"
            yield Broken(invariants.BELIEVED_IS_WHOLE, f"{kind.name}: {text}")
        log = self._job.attempt.node_logs(holder) / "flusher.log"
        said = log.read_text(errors="replace") if log.exists() else ""
        reported = [line for line in said.splitlines() if DAMAGED in line]
        if not sum(damaged) or not reported:
            text = f"expected a report of the damage in {log.name} of n{holder}; "
            text += f"damaged pages: {sum(damaged)}"
            yield Broken(invariants.RECOVERS, f"{kind.name}: {text}")
        self._details += [line[-LOST_TEXT_MAX:] for line in reported[:1]]

    # --- a loss -------------------------------------------------------------------------

    def _lose(
        self,
        kind: Kind,
        *nodes: int,
        after: NodeLoss | None = None,
        after_steps: int = 0,
        before: Callable[[], None] = lambda: None,
    ) -> NodeLoss:
        """Kill nodes at a random step of training; wait until the job trains again."""
        target = self._target
        needs_commit = after is None and not after_steps
        mark = target.wait_for("training", lambda: target.steady(commits=needs_commit))
        place, enough = mark.place, target.resumed_step(mark.place) + after_steps
        target.wait_for(f"step {enough}", lambda: target.newest_step_of(place) >= enough)
        warm = self._wait_for_standbys(place)
        load = os.getloadavg()[0]
        time.sleep(self._chance.uniform(0.0, MOMENT_S_MAX))
        before()
        target.look()
        assert target.newest is not None
        mark, killed_at = target.newest, time.time()
        self._job.kill(*nodes)
        target.wait_for("the recovery", lambda: target.steady(after=mark.place, commits=False))
        started = [
            event
            for event in target.events_of(EventKind.LAUNCH_STARTED)
            if place_of(event) > mark.place
        ]
        first = target.first_of(place_of(started[0]))
        if first is None:
            raise ServiceError(f"{kind.name}: {place_of(started[0])} did not train")
        resumed = target.resumed_step(first.place)
        loss = NodeLoss(
            nodes=nodes,
            mark=mark,
            killed_at=killed_at,
            started=started[0],
            resumed=resumed,
            steps_lost=max(0, target.newest_step_of(mark.place) - resumed),
            first_step_s=first.time - killed_at,
            warm=warm,
            load=load,
        )
        self._losses.append(loss)
        self._details.append(str(loss))
        return loss

    def _judge(
        self, kind: Kind, loss: NodeLoss, *, way: str, ranks: int, is_bounded: bool = True
    ) -> Iterator[Broken]:
        came = loss.started.data.get("way"), loss.started.data.get("world_size")
        if came != (way, ranks):
            text = f"expected {way} with {ranks} ranks, got {came[0]} with {came[1]}"
            yield Broken(invariants.RECOVERS, f"{kind.name}: {text}")
        most = LOSS_STEPS[kind.loss]
        if is_bounded and loss.steps_lost > most:
            text = f"{loss.steps_lost} steps lost, expected at most {most}"
            yield Broken(invariants.RECOVERS, f"{kind.name}: {text}")

    def _salvaged(self, loss: NodeLoss) -> list[int]:
        """Return the steps that were committed after the loss, before the next launch."""
        events = self._target.events_of(EventKind.COMMITTED, loss.killed_at)
        return [
            int(event.data["step"])
            for event in events
            if event.data.get("reason") == "crash" and event.time <= loss.started.time
        ]

    def _was_saved(self, loss: NodeLoss) -> bool:
        """Return True if the loss came so soon after a save that no newer copy had to be there."""
        events = self._target.events_of(EventKind.COMMITTED)
        saved = {event.data.get("step") for event in events if event.time < loss.killed_at}
        return loss.resumed in saved and loss.steps_lost <= LOSS_STEPS[Loss.COPY]

    def _wait_for_standbys(self, current: LaunchPlace) -> int:
        """Wait until the ranks that are loaded ahead stand still; return their number."""
        nodes = len(self._job.owners)
        give_up, before = time.monotonic() + WARM_S_MAX, dict[int, float]()
        while time.monotonic() < give_up:
            now = _standbys(self._job, current)
            if len(now) >= nodes and now == before:
                break
            before = now
            time.sleep(WARM_LOOK_S)
        return len(before)

    def _flusher(self, node: int) -> psutil.Process:
        # Processes that the flusher has forked have its arguments until they run another program.
        agent = self._job.processes_on(node)[0]
        found = [process for process in agent.children() if MODULE in process.cmdline()]
        if not found:
            raise ServiceError(f"n{node} has no flusher")
        return found[0]

    # --- checks -------------------------------------------------------------------------

    def _check(self, owners: list[psutil.Process]) -> list[Broken]:
        target = self._target
        target.look()
        paths, events = target.paths, target.events
        history = load_history(paths)
        place = target.newest.place if target.newest else None
        strays = process_list.orphans(paths, owners, place)
        return [
            *invariants.check_checkpoints(paths, events),
            *invariants.check_records(self._url, paths, events, history),
            *(Broken(invariants.NO_ORPHANS, f"process {process}") for process in strays),
        ]

    def _check_end(self) -> Iterator[Broken]:
        """Check that the stopped attempt saved its last step."""
        outcome = read_document(Outcome, self._job.attempt.outcome)
        if outcome is None or outcome.cause is not Cause.PREEMPTION:
            yield Broken(invariants.RECOVERS, f"the attempt ended as {outcome and outcome.cause}")
        elif outcome.committed_step != (last := outcome.launches[-1].last_step):
            text = f"step {last} was the last, and step {outcome.committed_step} was committed"
            yield Broken(invariants.RECOVERS, text)

    def _compare(self) -> list[Broken]:
        target = self._target
        target.look()
        sizes: Sizes = [
            (place_of(one.started), int(one.started.data["world_size"]), one.resumed)
            for one in self._losses
        ]
        try:
            wrong = compare_steps(self._testbed, target.steps, sizes)
        except ServiceError as error:
            wrong = [str(error)]
        self._result.steps += len({step.step for step in target.steps})
        return [Broken(invariants.STEPS_ARE_RIGHT, problem) for problem in wrong[:1]]

    def _record(self, kind: Kind, broken: list[Broken], took_s: float) -> FaultResult:
        details = self._details or [kind.summary]
        text = "; ".join([*details, *(f"BROKEN {b.invariant}: {b.detail}" for b in broken)])
        loss = self._losses[0] if self._losses else None
        at = loss.killed_at if loss else 0.0
        lost = self._target.events_of(EventKind.NODE_LOST, at) if loss else []
        reported = round(lost[0].time - at, 3) if lost else None
        one = FaultResult(
            kind=kind.name,
            ok=not broken,
            detail=text,
            run=self._target.paths.name,
            step=loss.mark.step if loss else -1,
            recovery=Recovery.IN_PLACE if loss else Recovery.UNDISTURBED,
            steps_lost=loss.steps_lost if loss else None,
            noticed_s=reported,
            reported_s=reported,
            first_step_s=round(loss.first_step_s, 3) if loss else None,
            took_s=round(took_s, 3),
        )
        self._result.faults.append(one)
        number = len(self._result.faults)
        state = "ok" if one.ok else "BROKEN"
        self._tell(f"{number}: {state} {kind.name} ({took_s:.1f} s): {text}")
        return one


SCENARIOS: Final[Mapping[str, Callable[[NodeRehearsal, Kind], Iterator[Broken]]]] = {
    "node-loss-spare": NodeRehearsal.lose_to_spare,
    "node-loss-shrink": NodeRehearsal.shrink,
    "neighbour-loss": NodeRehearsal.lose_neighbours,
    "replica-damage": NodeRehearsal.damage_replica,
}


def _spec(kind: Kind, name: str, testbed: Testbed, records: Path) -> RunSpec:
    has_spare = kind.name != "node-loss-shrink"
    has_copies = kind.name in {"neighbour-loss", "replica-damage"}
    is_rare = kind.name == "neighbour-loss"
    return RunSpec.model_validate(
        {
            "name": name,
            "command": PROGRAM,
            "config": testbed.settings(records, steps=STEPS_UNBOUNDED, step_s=STEP_S),
            "environment": {"OMP_NUM_THREADS": "1"},
            "launch": {"working_directory": str(testbed.folder)},
            "resources": {
                "executor": "slurm",
                "nodes": NODES,
                "gpus_per_node": 1,
                "gres": "none",
                "spare_nodes": int(has_spare),
            },
            "elastic": {"choices": [1, SMALLER, NODES]},
            "checkpoint": {
                "interval": RARE_INTERVAL_STEPS if is_rare else INTERVAL_STEPS,
                "snapshots": SNAPSHOT_STEPS,
                "neighbour": has_copies,
                "keep": {"last": KEEP_LAST},
            },
            "supervision": {
                "notices": "off",
                "heartbeat_s": 0.25,
                "silence_s": SILENCE_S,
                "backoff_s": 0.0,
                "restarts_in_place": UNLIMITED,
            },
        }
    )


def _standbys(job: NodeJob, current: LaunchPlace) -> dict[int, float]:
    """Return the seconds of CPU of each rank that is loaded ahead, for a launch after `current`."""
    found: dict[int, float] = {}
    for one in process_list.marked_processes(job.paths):
        try:
            variables = one.process.environ()
            is_ahead = one.place is not None and one.place > current
            if is_ahead and STANDBY_PIPE in variables and "LOCAL_RANK" in variables:
                times = one.process.cpu_times()
                found[one.process.pid] = times.user + times.system
        except psutil.Error:
            continue
    return found
