"""A played node process: the agent of node 0, with the real claim, stop and outcome code.

It trains by counting steps. It starts no ranks, so it builds the launch's ending itself.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tests.interleavings.cluster import Cluster, Job

from holdfast.contracts.disk.digests import FileChecksum
from holdfast.contracts.disk.durable import make_directory, write_bytes
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import FileEntry, Manifest, encode_manifest
from holdfast.contracts.disk.paths import MANIFEST, AttemptPaths, CheckpointName, SuccessorPaths
from holdfast.workers.agent.claim import claim
from holdfast.workers.agent.context import AgentContext, load_context
from holdfast.workers.agent.lead import Ended
from holdfast.workers.agent.leading import build_outcome, leave_outcome
from holdfast.workers.agent.node import CrashReport
from holdfast.workers.agent.restart import find_attempt
from holdfast.workers.agent.stops.sources import StopRequest, StopWatch
from holdfast.workers.agent.successor import wait_for_verdict
from holdfast.workers.decisions.causes import RankFailure
from holdfast.workers.nodes.heartbeats import HeartbeatWriter, NodeBeat, RankBeat

TURN_S: Final = 5.0
DIGEST: Final = "d" * 64


@dataclass
class Agent:
    """The agent of one job. `ends` is how the program ends at the next turn, or ''."""

    cluster: Cluster
    job: Job
    ends: str = ""
    # How it ended by itself, once it has: a later wish comes too late.
    ended_as: str = ""
    step: int = 0
    signals: list[str] = field(default_factory=list)
    # Set once the claim is made; only then does the job train.
    trains: bool = False
    # A successor whose job has started, and that no attempt has taken yet.
    is_waiting: bool = False

    def run(self) -> None:
        """Claim the attempt, train until something ends that, and write the outcome."""
        assert self.job.request is not None
        environment = {
            "SLURM_JOB_ID": self.job.id,
            "SLURMD_NODENAME": self.job.batch_host,
            "SLURM_STEP_NODELIST": ",".join(self.job.hosts),
            "SLURM_RESTART_COUNT": str(self.job.restarts),
        }
        request = self._await_attempt(self.job.request)
        if request is None:
            self.cluster.end(self.job, "COMPLETED")
            return
        context = load_context(request, environment)
        with JournalWriter(context.attempt.node_journal(0)) as journal:
            was_training = self.trains
            if not was_training:
                if not claim(context, journal):
                    self.cluster.end(self.job, "COMPLETED")
                    return
                self.trains = True
                self._begin(context, journal)
            state = self._train(context, journal, looks_first=not was_training)
        self.trains = False
        self.cluster.end(self.job, state)

    def _await_attempt(self, request: Path) -> Path | None:
        """Return the request of the attempt that the job runs; None if it runs none."""
        if not self.job.is_successor and not self.job.restarts:
            return request
        self.is_waiting = True
        if self.job.restarts:
            first = AttemptPaths(request.parent)
            found = find_attempt(first, self.job.restarts, is_lead=True)
            self.is_waiting = False
            return found.request if found else None
        paths = SuccessorPaths(request.parent)
        number = wait_for_verdict(paths, is_lead=True)
        self.is_waiting = False
        return paths.run.attempt(number).request if number else None

    def _begin(self, context: AgentContext, journal: JournalWriter) -> None:
        names = context.run.list_checkpoint_names()
        newest = names[-1] if names else None
        self.step = newest.step if newest else 0
        number = context.attempt.number
        facts: dict[str, Any] = {"attempt": number, "launch": 1}
        journal.append(EventKind.LAUNCH_STARTED, **facts, world_size=context.request.world_size)
        with JournalWriter(context.attempt.rank_journal) as ranks:
            ranks.append(
                EventKind.RESUMED,
                **facts,
                checkpoint=str(newest) if newest else None,
                step=self.step,
                skipped=[],
                command_digest=DIGEST,
                world_size=context.request.world_size,
            )

    def _train(self, context: AgentContext, journal: JournalWriter, *, looks_first: bool) -> str:
        """Train until the program ends or is stopped; write the outcome, return the job's state."""
        began, first = time.time(), self.step
        stops = StopWatch(context, lambda: 1.0)
        # An agent that a schedule ends leaves by an exception.
        with closing(HeartbeatWriter(context.attempt)) as beats:
            stop = self._stop(stops, context) if looks_first else None
            while stop is None and not self.ends:
                self._beat(context, beats)
                time.sleep(TURN_S)
                self.step += 1
                stop = self._stop(stops, context)
        self.ended_as = "" if stop is not None else self.ends
        number = context.attempt.number
        if stop is not None:
            journal.append(
                EventKind.SIGNAL,
                attempt=number,
                source=stop.source,
                name=stop.name,
                cause=stop.cause.value,
                deadline=stop.deadline,
                detail=stop.detail,
            )
        is_hasty = stop is not None and stop.deadline is not None and stop.deadline <= time.time()
        if self.ended_as != "crash" and not is_hasty:
            commit(context, self.step)
        outcome = build_outcome(self._lead(context, stop, began, first))
        leave_outcome(context, outcome, journal)
        return "COMPLETED" if self.ended_as != "crash" else "FAILED"

    def _stop(self, stops: StopWatch, context: AgentContext) -> StopRequest | None:
        now = time.time()
        if self.signals:
            name = self.signals.pop(0)
            found, _ = stops.from_signal(name, now)
            return found
        return stops.from_file(now)

    def _beat(self, context: AgentContext, beats: HeartbeatWriter) -> None:
        rank = RankBeat(rank=0, step=self.step, phase="STEP", age_s=0.1, step_time_s=1.0, pid=1)
        beat = NodeBeat(
            node=0,
            host=context.host,
            time=time.time(),
            attempt=context.attempt.number,
            launch=1,
            agent_pid=1,
            monotonic_s=time.monotonic(),
            every_s=TURN_S,
            ranks=(rank,),
        )
        beats.write([beat.model_dump(mode="json", exclude_none=True)])

    def _lead(
        self, context: AgentContext, stop: StopRequest | None, began: float, first: int
    ) -> Any:
        """Return what `build_outcome` reads of the object that leads an attempt."""
        kinds = {"crash": "crashed", "user_error": "crashed", "complete": "completed"}
        ending = kinds.get(self.ended_as, "stopped")
        crash = CrashReport()
        if ending == "crashed":
            killed = self.ended_as == "crash"
            text = "" if killed else "Traceback\nValueError: the loss is a string"
            crash = CrashReport(
                failures=[
                    RankFailure(
                        rank=0, exit_code=-9 if killed else 1, traceback=text, host=context.host
                    )
                ]
            )
        code = {"crashed": 1}.get(ending, 0)
        last = Ended(
            ending=ending,
            exit_code=code,
            reports=(),
            crash_report=crash,
            saved=(first, self.step),
        )
        nobody = SimpleNamespace(ending=None, hosts=())
        return SimpleNamespace(
            context=context,
            last=last,
            stop_request=stop,
            launches=[last.record(1, began)],
            world_size=context.request.world_size,
            group=SimpleNamespace(
                nodes=[SimpleNamespace(name=host) for host in context.hosts],
                hosts=list(context.hosts),
                lost={},
            ),
            root=nobody,
            health=nobody,
            gpus=nobody,
            slow=nobody,
            program=None,
            verdict="",
            bad_ending=lambda ended: ended.crash_report.classify(()),
        )


def commit(context: AgentContext, step: int) -> str:
    """Commit a small checkpoint of `step`, as a flusher does; return its name."""
    name = CheckpointName(step, context.attempt.number, 1)
    directory = context.run.checkpoint(name)
    make_directory(directory)
    content = f"state of step {step}".encode()
    checksum = FileChecksum(len(content))
    checksum.update(content)
    (directory / "__0_0.distcp").write_bytes(content)
    manifest = Manifest(
        run_uid=context.request.run_uid,
        run=context.request.run,
        name=str(name),
        step=step,
        attempt=context.attempt.number,
        launch=1,
        world_size=context.request.world_size,
        parent=None,
        command_digest=DIGEST,
        files=(FileEntry.of("__0_0.distcp", len(content), checksum),),
        staged_at=time.time(),
        committed_at=time.time(),
    )
    write_bytes(directory / MANIFEST, encode_manifest(manifest))
    with JournalWriter(context.attempt.rank_journal) as journal:
        journal.append(
            EventKind.COMMITTED,
            attempt=context.attempt.number,
            launch=1,
            checkpoint=str(name),
            step=step,
            bytes=manifest.bytes,
        )
    return str(name)
