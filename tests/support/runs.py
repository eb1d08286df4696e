"""Run folders as flows, agents and flushers leave them, written with `contracts`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.contracts.disk.digests import FileChecksum
from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.paths import MANIFEST, AttemptPaths, CheckpointName, RunPaths
from holdfast.contracts.records.documents import (
    Claim,
    LaunchRecord,
    Outcome,
    Request,
    RunRecord,
    Submission,
    write_document,
)
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause

T0 = 1_700_000_000.0
DIGEST = "d" * 64


def file_checksum(path: Path) -> str:
    """The checksum of a whole file, as its writer computes it."""
    running = FileChecksum(path.stat().st_size)
    running.update(path.read_bytes())
    return running.finish()[0]


@dataclass
class RunFolder:
    """Builds one run's folder step by step; `at` is the time of its documents, Unix seconds."""

    root: Path
    name: str
    uid: str
    spec_fields: dict[str, Any] = field(default_factory=dict)
    created_at: float = T0
    forked_from: str | None = None
    forked_uid: str | None = None
    forked_path: str | None = None
    created_by: str = "tester"

    def __post_init__(self) -> None:
        self.spec = RunSpec(name=self.name, command=("train.py",), **self.spec_fields)
        self.paths = RunPaths(self.root / self.name)
        make_directory(self.paths.directory)
        record = RunRecord(
            uid=self.uid,
            run=self.name,
            name=self.name,
            root=str(self.root),
            created_at=self.created_at,
            created_by=self.created_by,
            spec=self.spec.model_dump(mode="json"),
            spec_digest=self.spec.digest,
            forked_from=self.forked_from,
            forked_uid=self.forked_uid,
            forked_path=self.forked_path,
        )
        write_document(self.paths.spec, record)

    def tell(self, writer: str, kind: EventKind, **data: Any) -> None:
        """Append an event to one of the run's journals."""
        with JournalWriter(self.paths.journal_of(writer)) as journal:
            journal.append(kind, durable=False, **data)

    def submit(
        self, number: int, world_size: int, at: float, reason: str = "after a preemption"
    ) -> AttemptPaths:
        """Submit an attempt at `at`. The `reason` is why it follows the last one."""
        attempt = self.paths.attempt(number)
        make_directory(attempt.directory)
        request = Request(
            run_uid=self.uid,
            run=self.name,
            run_directory=str(self.paths.directory),
            attempt=number,
            job_name=f"holdfast-{self.name}-a{number:04d}",
            executor="local",
            nodes=1,
            gpus_per_node=world_size,
            command=self.spec.command,
            working_directory="/",
            environment={},
            config={},
            launch=self.spec.launch,
            resources=self.spec.resources,
            supervision=self.spec.supervision,
            command_digest=DIGEST,
            scheduler={},
            created_at=at,
            reason="first" if number == 1 else reason,
        )
        write_document(attempt.request, request)
        self.tell("flow", EventKind.ATTEMPT_RESERVED, attempt=number, gpus=world_size, nodes=1)
        submission = Submission(job_id=f"{100 + number}", executor="local", submitted_at=at)
        write_document(attempt.submission, submission)
        self.tell("flow", EventKind.ATTEMPT_SUBMITTED, attempt=number, job_id=submission.job_id)
        return attempt

    def claim(self, number: int, at: float, host: str = "node-a") -> None:
        """The agent of node 0 claims the attempt."""
        claim = Claim(
            job_id=f"{100 + number}",
            pid=4000 + number,
            process_start_s=1.0,
            boot_id="boot",
            host=host,
            claimed_at=at,
        )
        write_document(self.paths.attempt(number).claim, claim)

    def launch(
        self,
        number: int,
        launch: int,
        step: int,
        checkpoint: str | None,
        world_size: int = 2,
    ) -> None:
        """torchrun starts, and rank 0 records where it resumes."""
        attempt = self.paths.attempt(number)
        with JournalWriter(attempt.node_journal(0)) as journal:
            journal.append(EventKind.LAUNCH_STARTED, attempt=number, launch=launch)
        with JournalWriter(attempt.journal / "rank0.jsonl") as journal:
            journal.append(
                EventKind.RESUMED,
                attempt=number,
                launch=launch,
                checkpoint=checkpoint,
                step=step,
                skipped=[],
                command_digest=DIGEST,
                world_size=world_size,
            )

    def log(self, number: int, launch: int, steps: range, at: float) -> None:
        """Metrics that the program logged: a falling loss, one step per second."""
        path = self.paths.metrics_of(number, launch)
        make_directory(path.parent)
        lines = [
            {"step": step, "time": at + index, "loss": 4.0 / (1 + step)}
            for index, step in enumerate(steps)
        ]
        with open(path, "a") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)

    def commit(
        self,
        step: int,
        attempt: int,
        launch: int = 1,
        *,
        parent: str | None = None,
        at: float = T0,
        world_size: int = 2,
        **fields: Any,
    ) -> str:
        """A committed checkpoint with one small file; returns its directory's name."""
        name = CheckpointName(step, attempt, launch)
        directory = self.paths.checkpoint(name)
        make_directory(directory)
        data = directory / "__0_0.distcp"
        data.write_bytes(f"state of step {step}".encode())
        entry = FileEntry(path=data.name, bytes=data.stat().st_size, checksum=file_checksum(data))
        manifest = Manifest(
            run_uid=self.uid,
            run=self.name,
            name=str(name),
            step=step,
            attempt=attempt,
            launch=launch,
            world_size=world_size,
            parent=parent,
            command_digest=DIGEST,
            **{
                "files": (entry,),
                "blocked_s": 0.5,
                "flush_s": 1.25,
                "staged_at": at - 1,
                "committed_at": at,
                **fields,
            },
        )
        write_bytes(directory / MANIFEST, to_json(manifest.model_dump(mode="json")))
        with JournalWriter(self.paths.attempt(attempt).journal / "rank0.jsonl") as journal:
            journal.append(
                EventKind.COMMITTED,
                attempt=attempt,
                checkpoint=str(name),
                step=step,
                bytes=manifest.bytes,
            )
        return str(name)

    def finish(
        self,
        number: int,
        state: AttemptState,
        cause: Cause | None,
        last_step: int | None,
        at: float,
        *,
        world_size: int = 2,
        host: str = "node-a",
        seen: str | None = None,
        **fields: Any,
    ) -> None:
        """The agent writes the outcome, and the flow records the end of the attempt."""
        outcome = Outcome(
            state=state,
            cause=cause,
            job_id=f"{100 + number}",
            hosts=(host,),
            world_size=world_size,
            command_digest=DIGEST,
            last_step=last_step,
            ended_at=at,
            **{"started_at": at - 100, **fields},
        )
        write_document(self.paths.attempt(number).outcome, outcome)
        self.record_attempt_end(number, state, cause, last_step, at, seen)

    def record_attempt_end(
        self,
        number: int,
        state: AttemptState,
        cause: Cause | None,
        last_step: int | None,
        at: float,
        seen: str | None = None,
    ) -> None:
        """The journal line that ends an attempt; the only record if its node is lost."""
        self.tell(
            "flow",
            EventKind.ATTEMPT_ENDED,
            attempt=number,
            state=state.value,
            cause=cause.value if cause else None,
            evidence=[seen or f"seen: {cause}"],
            last_step=last_step,
            ended_at=at,
        )

    def delete(self, name: str, reason: str) -> None:
        """Delete a checkpoint in the real order: journal line, tombstone, removal."""
        self.tell("cli", EventKind.CHECKPOINT_DELETED, checkpoint=name, reason=reason, by="tester")
        make_directory(self.paths.tombstones)
        directory = self.paths.checkpoint(name)
        write_bytes(self.paths.tombstone(name), (directory / MANIFEST).read_bytes())
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def build_sample_runs(root: Path) -> Iterator[RunFolder]:
    """Build a run and its fork step by step; yields after every change that a reader could see.

    The run has a preemption, a restart in place, a node failure, a pin, a deletion, a rollback,
    an export and a fork.
    """
    run = RunFolder(root, "gpt", "a" * 32, {"resources": {"gpus_per_node": 2}, **PRICE})
    yield run
    yield from _first_attempt(run)
    yield from _lost_attempt(run)
    yield from _last_attempt(run)
    fork = RunFolder(
        root,
        "gpt-b",
        "b" * 32,
        created_at=T0 + 900,
        forked_from="gpt:step-00000100.a0001.l01",
        forked_uid=run.uid,
    )
    run.tell(
        "cli",
        EventKind.FORKED,
        checkpoint="step-00000100.a0001.l01",
        into_uid=fork.uid,
        into_run=fork.name,
    )
    yield fork
    fork.submit(1, 2, T0 + 910)
    fork.claim(1, T0 + 920)
    fork.launch(1, 1, 100, "gpt:step-00000100.a0001.l01")
    yield fork
    fork.commit(150, 1, parent="gpt:step-00000100.a0001.l01", at=T0 + 990)
    yield fork


PRICE: dict[str, Any] = {"cost": {"gpu_hour": 2.0}}


def _first_attempt(run: RunFolder) -> Iterator[RunFolder]:
    """Steps 1 to 120; a crash in between; then a preemption with a last flush at 120."""
    run.tell("flow", EventKind.SUPERVISED, host="login", pid=7, flow_run="flow-1")
    run.submit(1, 2, T0)
    yield run
    run.claim(1, T0 + 10)
    run.launch(1, 1, 0, None)
    yield run
    first = run.commit(50, 1, 1, at=T0 + 60)
    run.log(1, 1, range(1, 51), T0 + 11)
    yield run
    second = run.commit(100, 1, 1, parent=f"gpt:{first}", at=T0 + 110)
    run.log(1, 1, range(51, 114), T0 + 61)
    run.launch(1, 2, 100, f"gpt:{second}")
    yield run
    # One directory without a manifest, from an interrupted save.
    make_directory(run.paths.checkpoint(CheckpointName(110, 1, 2)))
    run.log(1, 2, range(101, 121), T0 + 120)
    run.commit(120, 1, 2, parent=f"gpt:{second}", at=T0 + 140, metrics={"loss": 2.5})
    run.finish(
        1,
        AttemptState.PREEMPTED,
        Cause.PREEMPTION,
        120,
        T0 + 145,
        stop_requested_at=T0 + 138,
        stop_committed_at=T0 + 140,
        launches=(
            LaunchRecord(
                number=1, started_at=T0 + 11, ended_at=T0 + 115, last_step=113, ending="crashed"
            ),
            LaunchRecord(
                number=2, started_at=T0 + 116, ended_at=T0 + 144, last_step=120, ending="stopped"
            ),
        ),
    )
    run.tell(
        "flow",
        EventKind.DECISION,
        after_attempt=1,
        action="relaunch",
        gpus=2,
        reason="a preemption is always forgiven",
    )
    yield run


def _lost_attempt(run: RunFolder) -> Iterator[RunFolder]:
    """Steps 121 to 170, committed to 150; the node dies, so there is only the journal line."""
    run.submit(2, 2, T0 + 150)
    run.claim(2, T0 + 160)
    run.launch(2, 1, 120, "gpt:step-00000120.a0001.l02")
    yield run
    run.commit(150, 2, parent="gpt:step-00000120.a0001.l02", at=T0 + 200)
    run.record_attempt_end(2, AttemptState.NODE_FAILED, Cause.NODE_FAILURE, 170, T0 + 260)
    run.tell("cli", EventKind.PINNED, checkpoint="step-00000050.a0001.l01", by="me", note="\0 keep")
    yield run


def _last_attempt(run: RunFolder) -> Iterator[RunFolder]:
    """A rollback to step 120, then on to step 200 and completion; one checkpoint is deleted."""
    run.tell(
        "cli",
        EventKind.ROLLED_BACK,
        to="step-00000120.a0001.l02",
        excluded=["step-00000150.a0002.l01"],
    )
    run.submit(3, 1, T0 + 300)
    run.claim(3, T0 + 310)
    run.launch(3, 1, 120, "gpt:step-00000120.a0001.l02")
    run.commit(200, 3, parent="gpt:step-00000120.a0001.l02", at=T0 + 400)
    yield run
    run.delete("step-00000120.a0001.l02", "keep.last 2: step 120 is older")
    run.tell(
        "cli",
        EventKind.EXPORTED,
        checkpoint="step-00000200.a0003.l01",
        format="torch",
        path="/exports/gpt.pt",
    )
    yield run
    run.finish(3, AttemptState.COMPLETED, None, 200, T0 + 405)
    run.tell("flow", EventKind.RUN_ENDED, state="completed", reason="the program finished")
    yield run
