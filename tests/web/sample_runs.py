"""Sample runs for the tests and screenshots of the web page, written as Holdfast writes them.

A live run that was preempted, resized and lost a node; its fork; a finished, a failed and a queued
one. Times lie before `now`, so that the page shows minutes and hours.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.support.runs import RunFolder
from tests.support.series import sample_gpu, write_gpus, write_ranks

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.records.documents import Submission, write_document
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.workers.nodes.heartbeats import HeartbeatWriter, NodeBeat, RankBeat
from holdfast.workers.nodes.series import RankTimes

MINUTE: Final = 60.0
HOUR: Final = 3600.0
STEP_S: Final = 1.2
# The width of a bucket of the series.
BUCKET_S: Final = 20.0
STATE_BYTES: Final = 1_083_000_000
LIVE: Final = "gpt-90m"
HELD: Final = "vit-l-distilled"
SUPERVISED: Final = (LIVE, "gpt-90m-8k", "llama-3b-instruct", HELD)
# The live run's current step; the checkpoint of three steps earlier is still being written.
NEWEST: Final = 16_503
COPY_S: Final = 41.5
FIELDS: Final[dict[str, Any]] = {
    "resources": {"gpus_per_node": 8},
    "cost": {"gpu_hour": 2.1, "on_demand_per_gpu_hour": 4.2},
    "config": {"steps": 20_000},
    "checkpoint": {"interval": 500, "keep": {"last": 4}},
}
TRACEBACK: Final = """\
Traceback (most recent call last):
  File "train.py", line 41, in main
    loss = criterion(model(batch), labels)
ValueError: Expected input batch_size (32) to match target batch_size (16).
"""


@contextlib.contextmanager
def clock(moment: float) -> Iterator[None]:
    """Journal events written in this context have this time, Unix seconds."""
    with mock.patch("time.time", return_value=moment):
        yield


class RunScript:
    """Writes one run's folder event by event, each at a given time."""

    def __init__(self, root: Path, name: str, uid: str, began: float, **fields: Any) -> None:
        own = {key: fields.pop(key) for key in ("forked_from", "forked_uid") if key in fields}
        self.run = RunFolder(root, name, uid * 32, FIELDS | fields, created_at=began, **own)
        self.parent: str | None = own.get("forked_from")
        self.step = 0
        # Unix seconds; nothing that is committed later is in the mirror.
        self.mirrored_until = 0.0

    def tell(self, at: float, writer: str, kind: EventKind, **data: Any) -> None:
        with clock(at):
            self.run.tell(writer, kind, **data)

    def begin(
        self, number: int, gpus: int, at: float, *, queued_s: float, host: str, why: str = ""
    ) -> None:
        """An attempt that waits, starts and resumes from the newest checkpoint."""
        with clock(at):
            self.run.submit(number, gpus, at, why)
        with clock(at + queued_s):
            self.run.claim(number, at + queued_s, host)
        with clock(at + queued_s + 20):
            self.run.launch(number, 1, self.step, self.parent, gpus)

    def train(self, number: int, gpus: int, until: int, at: float, every: int = 500) -> float:
        """Train up to step `until` with a checkpoint every `every` steps; returns the end time."""
        lines, began = [], self.step
        for step in range(began + 1, until + 1):
            moment = at + (step - began) * STEP_S
            if step % 20 == 0:
                lines.append({"step": step, "time": moment, **measured(step, gpus)})
            if step % every == 0:
                self.commit(step, number, moment, gpus)
        path = self.run.paths.metrics_of(number, 1)
        make_directory(path.parent)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        self.step = until
        return at + (until - began) * STEP_S

    def commit(self, step: int, number: int, at: float, gpus: int) -> None:
        facts: dict[str, Any] = {"world_size": gpus, "metrics": measured(step, gpus)}
        files = shards(step, gpus)
        with clock(at):
            name = self.run.commit(step, number, parent=self.parent, at=at, files=files, **facts)
        for entry in files:
            path = self.run.paths.checkpoint(name) / entry.path
            path.touch()
            # A sparse file: the size of a real one without its disk use.
            os.truncate(path, entry.bytes)
        self.parent = f"{self.run.name}:{name}"
        if at + COPY_S < self.mirrored_until:
            copied = {"url": "s3://team-runs/gpt-90m", "bytes": STATE_BYTES, "seconds": COPY_S}
            kind = EventKind.MIRRORED
            self.tell(at + COPY_S, "mirror", kind, checkpoint=name, step=step, **copied)

    def stage(self, step: int, number: int, at: float) -> None:
        """A save that is staged in memory and not yet committed."""
        name = CheckpointName(step, number, 1)
        journal = self.run.paths.attempt(number).journal / "rank0.jsonl"
        with clock(at), JournalWriter(journal) as writer:
            facts: dict[str, Any] = {"bytes": STATE_BYTES, "blocked_s": 0.21, "reason": "interval"}
            writer.append(EventKind.STAGED, checkpoint=str(name), step=step, **facts)

    def end(
        self, number: int, state: AttemptState, cause: Cause | None, at: float, **fields: Any
    ) -> None:
        with clock(at):
            self.run.finish(number, state, cause, self.step, at, **fields)


def shards(step: int, gpus: int) -> tuple[FileEntry, ...]:
    """The manifest's entry for each rank's file."""
    return tuple(
        FileEntry(
            path=f"__{rank}_0.distcp",
            bytes=STATE_BYTES // gpus + 4096 * rank,
            checksum=hashlib.blake2b(f"{step}/{rank}".encode(), digest_size=16).hexdigest(),
        )
        for rank in range(gpus)
    )


def measured(step: int, gpus: int) -> dict[str, float]:
    """A falling, noisy loss, and a throughput proportional to the number of GPUs."""
    noise = math.sin(step * 12.9898) * 43758.5453 % 1 - 0.5
    loss = 2.6 + 8 * math.exp(-step / 1800) + noise * 0.25
    return {"loss": round(loss, 4), "tokens_per_s": round(gpus * 11_800 * (1 + noise / 20))}


@contextlib.contextmanager
def supervised(root: Path) -> Iterator[None]:
    """Hold the locks of the runs under way, as their supervisors do."""
    with contextlib.ExitStack() as stack:
        for name in filter(lambda name: (root / name).is_dir(), SUPERVISED):
            assert stack.enter_context(FlowLock(RunPaths(root / name).flow_lock)).try_take()
        yield


def write_sample_runs(root: Path, now: float) -> None:
    """Write all runs under `root`."""
    write_live_run(root, now)
    write_fork(root, now)
    write_finished_run(root, now - 30 * HOUR)
    write_failed_run(root, now - 8 * HOUR)
    write_queued_run(root, now - 25 * MINUTE)


def write_live_run(root: Path, now: float) -> None:
    """Preempted, resumed at half the size, lost a node, and running again."""
    script = RunScript(root, LIVE, "a", now - 6 * HOUR)
    script.mirrored_until = now - 12 * MINUTE
    script.tell(
        now - 6 * HOUR, "flow", EventKind.SUPERVISED, host="login", pid=7, flow_run="flow-1"
    )
    at = now - 6 * HOUR
    script.begin(1, 8, at, queued_s=8 * MINUTE, host="gpu-03")
    at = script.train(1, 8, 5_230, at + 9 * MINUTE)
    script.commit(5_230, 1, at + 14, 8)
    script.end(
        1,
        AttemptState.PREEMPTED,
        Cause.PREEMPTION,
        at + 20,
        world_size=8,
        host="gpu-03",
        started_at=now - 6 * HOUR + 8 * MINUTE,
        stop_requested_at=at,
        stop_committed_at=at + 14,
        seen="Slurm reports job 101 as PREEMPTED",
    )
    decide(script, 1, at + 21, 4, "a preemption is always forgiven; 4 GPUs are free")
    at += 2 * MINUTE
    why = "after preemption of attempt 1: 4 GPUs (4 are free)"
    script.begin(2, 4, at, queued_s=5 * MINUTE, host="gpu-11", why=why)
    script.tell(
        at + 15 * MINUTE, "cli", EventKind.PINNED, by="mia", note="for the paper", **first()
    )
    at = script.train(2, 4, 8_930, at + 6 * MINUTE)
    with clock(at):
        lost = AttemptState.NODE_FAILED, Cause.NODE_FAILURE, 8_930
        script.run.record_attempt_end(2, *lost, at, "gpu-11: its agent is lost")
    decide(script, 2, at + 1, 8, "the node is left out for an hour; 8 GPUs are free")
    why = "after node_failure of attempt 2: 8 GPUs (8 are free)"
    script.step = 8_500
    script.begin(3, 8, at + MINUTE, queued_s=2 * MINUTE, host="gpu-03", why=why)
    script.train(3, 8, NEWEST - 4, now - (NEWEST - 8_500) * STEP_S)
    script.step = NEWEST
    for name in ("step-00000500.a0001.l01", "step-00001000.a0001.l01"):
        with clock(now - 3 * HOUR):
            script.run.delete(name, "keep.last 4: it is older")
    script.stage(NEWEST - 3, 3, now - 4)
    facts = {"ok": True, "by": "mia", "bytes": STATE_BYTES, "damaged": []}
    script.tell(now - 2 * HOUR, "cli", EventKind.VERIFIED, **first(), **facts)
    export = {"format": "safetensors", "path": "/exports/gpt-90m-5000"}
    script.tell(now - 100 * MINUTE, "cli", EventKind.EXPORTED, **first(), **export)
    beat(script.run.paths, 3, script.step, now)
    write_logs(script, 3)
    write_series(script.run.paths, 3, now - (NEWEST - 8_500) * STEP_S, now)


def write_series(paths: RunPaths, number: int, start: float, end: float) -> None:
    """The ranks and GPUs of the one node over time. The data of rank 5 were slow for a while."""
    attempt, buckets = paths.attempt(number), int((end - start) / BUCKET_S)
    slow = range(buckets // 2, buckets * 5 // 8)

    def times(rank: int, bucket: int) -> RankTimes:
        noise = math.sin(bucket * 12.9898 + rank) * 43758.5453 % 1 - 0.5
        step_s = STEP_S * (1.6 if bucket in slow else 1.0) * (1 + noise / 25)
        is_slow = rank == 5 and bucket in slow
        data_s = 0.6 * step_s if is_slow else 0.02
        return RankTimes(step_s, data_s, 0.0 if is_slow else max(0.0, step_s - 0.8 * STEP_S))

    facts: dict[str, Any] = {"start": start, "width_s": BUCKET_S, "host": "gpu-03"}
    write_ranks(attempt, times, buckets=buckets, count=8, **facts)
    beats = (tuple(sample_gpu(index, bucket) for index in range(8)) for bucket in range(buckets))
    write_gpus(attempt, beats, **facts)


def first() -> dict[str, str]:
    return {"checkpoint": "step-00005000.a0001.l01"}


def decide(script: RunScript, after: int, at: float, gpus: int | None, reason: str) -> None:
    """The decision after an attempt: another one on so many GPUs, or none."""
    action = "relaunch" if gpus else "stop"
    data = {"after_attempt": after, "action": action, "gpus": gpus, "reason": reason}
    script.tell(at, "flow", EventKind.DECISION, **data)


def beat(paths: RunPaths, number: int, step: int, now: float) -> None:
    """The heartbeat of the one node."""
    attempt = paths.attempt(number)
    ranks = tuple(
        RankBeat(
            rank=rank,
            step=step,
            phase="train",
            age_s=0.3 + rank / 10,
            step_time_s=STEP_S,
            pid=4200 + rank,
            step_p50_s=STEP_S,
            step_p99_s=STEP_S * 1.3,
            own_s=STEP_S * 0.8 + rank / 100,
            rss_bytes=9_400_000_000 + rank * 3_000_000,
            cpu_percent=97.0 - rank,
        )
        for rank in range(8)
    )
    node = NodeBeat(
        node=0,
        host="gpu-03",
        time=now,
        attempt=number,
        launch=1,
        agent_pid=4000,
        world_size=8,
        ranks=ranks,
        memory_percent=41.0,
    )
    writer = HeartbeatWriter(attempt)
    writer.write([node.model_dump(mode="json")])
    writer.close()


def write_logs(script: RunScript, number: int) -> None:
    """The output of two of the ranks, of torchrun and of the agent."""
    attempt = script.run.paths.attempt(number)
    make_directory(attempt.node_logs(0) / "l01")
    (attempt.node_logs(0) / "l01" / "torchrun.log").write_text("rendezvous: 8 ranks on 1 node\n")
    (attempt.logs / "4203_0_log.out").write_text(f"attempt {number}: launch 1 started\n")
    for rank in (0, 1):
        log = attempt.logs / "node-0000" / "l01" / f"rank-{rank:05d}.stdout.log"
        make_directory(log.parent)
        steps = range(max(1, script.step - 400), script.step, 20)
        lines = [f"step {s} loss {measured(s, 8)['loss']:.4f} 8.3 it/s" for s in steps]
        log.write_text("".join(f"{line}\n" for line in lines))


def write_fork(root: Path, now: float) -> None:
    """Forked from the pinned checkpoint of the live run; trains on two GPUs."""
    parent = f"{LIVE}:step-00005000.a0001.l01"
    began = now - 50 * MINUTE
    fork = RunScript(root, "gpt-90m-8k", "b", began, forked_from=parent, forked_uid="a" * 32)
    fork.step = 5_000
    fork.begin(1, 2, began, queued_s=4 * MINUTE, host="gpu-05")
    fork.train(1, 2, 5_000 + int(44 * MINUTE / STEP_S), began + 5 * MINUTE)


def write_finished_run(root: Path, began: float) -> None:
    """One attempt that completed."""
    script = RunScript(root, "vit-l-ablation", "c", began, config={"steps": 9_000})
    script.begin(1, 4, began, queued_s=2 * MINUTE, host="gpu-07")
    at = script.train(1, 4, 9_000, began + 3 * MINUTE, every=1_500)
    facts: dict[str, Any] = {"world_size": 4, "host": "gpu-07", "started_at": began + 2 * MINUTE}
    script.end(1, AttemptState.COMPLETED, None, at + 5, **facts)
    script.tell(
        at + 6, "flow", EventKind.RUN_ENDED, state="completed", reason="the program finished"
    )


def write_queued_run(root: Path, began: float) -> None:
    """Submitted on another machine, whose scheduler cannot be queried from here."""
    script = RunScript(root, "llama-3b-instruct", "f", began)
    submit_elsewhere(script, "88", 16, began)
    pending(script, began + MINUTE, "Resources", began + 70 * MINUTE)


def write_held_run(root: Path, began: float) -> None:
    """A run whose job a person has to release."""
    script = RunScript(root, HELD, "e", began)
    submit_elsewhere(script, "91", 4, began)
    pending(script, began + MINUTE, "JobHeldUser", None)


def submit_elsewhere(script: RunScript, job: str, gpus: int, at: float) -> None:
    """Submit the first attempt on another machine, whose scheduler cannot be asked from here."""
    with clock(at):
        attempt = script.run.submit(1, gpus, at)
    where = Submission(job_id=job, executor="local", submitted_at=at, host="login")
    write_document(attempt.submission, where)


def pending(script: RunScript, at: float, why: str, starts_at: float | None) -> None:
    """What the supervisor journals about a pending job, by the answer of Slurm."""
    state = {"state": AttemptState.PENDING.value, "detail": why, "starts_at": starts_at}
    script.tell(at, "flow", EventKind.ATTEMPT_STATE, attempt=1, **state)


def write_failed_run(root: Path, began: float) -> None:
    """Failed with a bug in the program, which no relaunch would fix."""
    script = RunScript(root, "bert-classifier", "d", began)
    script.begin(1, 2, began, queued_s=MINUTE, host="gpu-05")
    script.step = 3
    script.end(
        1,
        AttemptState.FAILED,
        Cause.USER_ERROR,
        began + 3 * MINUTE,
        traceback=TRACEBACK,
        failed_rank=1,
        failed_host="gpu-05",
        host="gpu-05",
        started_at=began + MINUTE,
        seen="rank 1 on gpu-05 ended with exit status 1",
    )
    log = script.run.paths.attempt(1).rank_log(0, 1, 1, "stderr")
    make_directory(log.parent)
    log.write_text(f"UserWarning: the tokenizer is slow\n{TRACEBACK}")
    why = "the program's own error: another attempt would end the same way"
    decide(script, 1, began + 4 * MINUTE, None, why)
    script.tell(began + 4 * MINUTE + 1, "flow", EventKind.RUN_ENDED, state="failed", reason=why)


if __name__ == "__main__":
    import sys

    write_sample_runs(Path(sys.argv[1]), time.time())
