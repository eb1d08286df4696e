"""What one turn of a supervisor costs in an old run: processor time and memory.

    python -m benchmarks.supervisors --saves 100000 --attempts 10 --runs 1

Each run has the journals of a year: `attempts` attempts that were preempted, the last of which
trains, and `saves` saves. Their supervisors take turns in one process, as in `--stay`. In each
turn, either nothing is new or a checkpoint was committed. The index is a SQLite file. A second
process does the same with runs that have one attempt and no save. `added_mb` compares the two.
With `--deleted`, the runs keep their last checkpoints only: all former saves have a tombstone and a
journal line, and each turn with a save deletes one more.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import FileEntry, Manifest, encode_manifest
from holdfast.contracts.disk.paths import MANIFEST, AttemptPaths, CheckpointName, RunPaths
from holdfast.contracts.records.documents import Outcome, Request, Submission, read_document
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.supervisor.submission import JOURNAL, submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index

YEAR_S: Final = 365 * 24 * 3600.0
TURNS: Final = 10
# Checkpoints that a run with `--deleted` keeps.
KEPT: Final = 3
DELETER: Final = "cli"
UID: Final = "0" * 32
FILE: Final = FileEntry(path="__0_0.distcp", bytes=1, checksum="0" * 32)
MB: Final = 1e6


@dataclass
class Turns:
    """A supervisor, and what is needed to give it a turn."""

    supervisor: Supervisor
    journal: JournalWriter
    rank: JournalWriter
    step: int

    def commit(self) -> None:
        """Write the lines of a save, and its files if the run keeps its last ones only."""
        self.step += 1
        paths = self.supervisor.paths
        attempt = paths.attempt_numbers()[-1]
        facts = _facts_of_save(attempt, self.step)
        if paths.journal_of(DELETER).exists():
            directory = paths.checkpoint(facts["checkpoint"])
            directory.mkdir(parents=True)
            (directory / FILE.path).write_bytes(b"x")
            content = encode_manifest(_manifest(paths, attempt, self.step, time.time()))
            (directory / MANIFEST).write_bytes(content)
        self.rank.append(EventKind.STAGED, durable=False, **facts)
        self.rank.append(EventKind.COMMITTED, durable=False, **facts)

    def take(self) -> float:
        """Take a turn; return the processor seconds of all threads, with the index's update."""
        # The update is measured each time, even if it would rest after a long one.
        self.supervisor._ingestion._rests_until = 0.0
        began = time.process_time()
        self.supervisor._turn(self.journal)
        while self.supervisor._ingestion._thread is not None:
            time.sleep(0.001)
        return time.process_time() - began


def grow_old(paths: RunPaths, saves: int, attempts: int, like: RunPaths | None) -> None:
    """Give a run the attempts before its last one. Runs share the files of their saves (`like`)."""
    request = read_document(Request, submit_next(paths, gpus=8, reason="first", exclude=()).request)
    assert request is not None
    number, step, now = 1, 0, time.time() - YEAR_S
    length_s = YEAR_S / attempts
    with JournalWriter(paths.journal_of(JOURNAL)) as journal:
        for number in range(1, attempts):
            attempt = paths.attempt(number)
            attempt.journal.mkdir(parents=True, exist_ok=True)
            submitted = Submission(job_id=f"{number}", executor="slurm", submitted_at=now)
            name = f"{request.job_name[:-4]}{number:04d}"
            again = request.model_copy(update={"attempt": number, "job_name": name})
            # Without fsync, which would take most of the time.
            attempt.request.write_text(again.model_dump_json())
            attempt.submission.write_text(submitted.model_dump_json())
            if like is None:
                write_saves(attempt, saves // attempts, step, now, length_s)
            else:
                for path in like.attempt(number).journal.iterdir():
                    os.link(path, attempt.journal / path.name)
            step += saves // attempts
            now += length_s
            _end(attempt, step, now, journal)


def write_saves(
    attempt: AttemptPaths,
    saves: int,
    step: int,
    now: float = 0.0,
    length_s: float = 1.0,
    *,
    is_live: bool = False,
) -> None:
    """Write the lines of node 0 and rank 0 of an attempt that begins at `now`."""
    now = time.time() if is_live else now
    number, every_s = attempt.number, length_s / (saves + 2)
    ends = now + length_s - 1.0
    node = [
        (now, EventKind.LAUNCH_STARTED, {"attempt": number, "launch": 1}),
        (ends, EventKind.SIGNAL, {"attempt": number, "cause": "preemption", "node": 0}),
        (ends, EventKind.LAUNCH_ENDED, {"attempt": number, "launch": 1, "last_step": step + saves}),
    ]
    rank = [(now + 1.0, EventKind.RESUMED, {"attempt": number, "launch": 1, "step": step})]
    for save in range(1, saves + 1):
        facts = _facts_of_save(number, step + save)
        at = now + save * every_s
        rank += [(at, EventKind.STAGED, facts), (at + 9.0, EventKind.COMMITTED, facts)]
    node = node[:1] if is_live else node
    for path, lines in ((attempt.node_journal(0), node), (attempt.rank_journal, rank)):
        with open(path, "w") as stream:
            for sequence, (at, kind, data) in enumerate(lines):
                line = {"writer": path.stem, "opening": 1, "sequence": sequence, "time": at}
                stream.write(json.dumps({**line, "kind": kind, "data": data}) + "\n")


def write_deletions(paths: RunPaths, saves: int, attempts: int) -> None:
    """Delete all checkpoints of the `saves`: each has a tombstone and a journal line."""
    paths.tombstones.mkdir(exist_ok=True)
    each, began = saves // attempts, time.time() - YEAR_S
    with open(paths.journal_of(DELETER), "w") as stream:
        for step in range(1, each * attempts + 1):
            attempt, at = (step - 1) // each + 1, began + step * YEAR_S / saves
            manifest = _manifest(paths, attempt, step, at)
            paths.tombstone(manifest.name).write_bytes(encode_manifest(manifest))
            reason = f"keep.last {KEPT}: step {step} is older"
            data = {"checkpoint": manifest.name, "reason": reason, "by": "keep rules"}
            line = {"writer": DELETER, "opening": 1, "sequence": step, "time": at}
            kind = EventKind.CHECKPOINT_DELETED
            stream.write(json.dumps({**line, "kind": kind, "data": data}) + "\n")


def _manifest(paths: RunPaths, attempt: int, step: int, at: float) -> Manifest:
    return Manifest(
        run_uid=UID,
        run=paths.name,
        name=str(CheckpointName(step, attempt, 1)),
        step=step,
        attempt=attempt,
        launch=1,
        world_size=8,
        parent=None,
        command_digest="d" * 64,
        files=(FILE,),
        blocked_s=0.125,
        flush_s=9.0,
        staged_at=at - 9.0,
        committed_at=at,
    )


def _facts_of_save(attempt: int, step: int) -> dict[str, Any]:
    name = str(CheckpointName(step, attempt, 1))
    facts = {"attempt": attempt, "launch": 1, "step": step, "checkpoint": name}
    return {**facts, "bytes": 123_456_789, "blocked_s": 0.125, "reason": "interval"}


def _end(attempt: AttemptPaths, step: int, now: float, journal: JournalWriter) -> None:
    outcome = Outcome(
        state=AttemptState.PREEMPTED,
        cause=Cause.PREEMPTION,
        job_id=f"{attempt.number}",
        hosts=("n1",),
        world_size=8,
        command_digest="d" * 64,
        last_step=step,
        ended_at=now,
        started_at=now - 1000.0,
    )
    attempt.outcome.write_text(outcome.model_dump_json())
    facts = outcome.model_dump(mode="json")
    journal.append(EventKind.ATTEMPT_ENDED, durable=False, **{**facts, "attempt": attempt.number})
    journal.append(EventKind.GOODPUT, durable=False, attempt=attempt.number, ettr=0.9)
    facts = {"action": "relaunch", "gpus": 8, "exclude": [], "reason": "after a preemption"}
    journal.append(EventKind.DECISION, durable=False, after_attempt=attempt.number, **facts)


def measure_turns(runs: Sequence[RunPaths]) -> dict[str, Any]:
    """Return what the turns of the runs' supervisors cost in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (runs,))


def _measure(runs: Sequence[RunPaths]) -> dict[str, Any]:
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    process, index = psutil.Process(), Index()
    index.open()
    gc.collect()
    before, began = process.memory_info().rss, time.process_time()
    supervised = list(_take_up(runs, index))
    started_s = time.process_time() - began
    quiet, committed = [], []
    for _ in range(TURNS):
        quiet += [one.take() for one in supervised]
        for one in supervised:
            one.commit()
        committed += [one.take() for one in supervised]
    gc.collect()
    return {
        "start_s": round(started_s / len(runs), 2),
        "turn_ms": round(1e3 * statistics.median(quiet), 1),
        "turn_with_save_ms": round(1e3 * statistics.median(committed), 1),
        "rss_mb": round((process.memory_info().rss - before) / MB, 1),
        "peak_mb": round(_peak_mb() - before / MB, 1),
    }


def _take_up(runs: Sequence[RunPaths], index: Index) -> Iterator[Turns]:
    for paths in runs:
        log = logging.getLogger("holdfast.benchmark")
        supervisor = Supervisor(paths=paths, index=index, log=log, submit=submit_next)
        supervisor._lock.__enter__()
        newest = paths.attempt(paths.attempt_numbers()[-1])
        journal = JournalWriter(paths.journal_of(JOURNAL))
        found = Turns(supervisor, journal, JournalWriter(newest.rank_journal), 10**6)
        found.take()
        yield found


def _peak_mb() -> float:
    """Return the most memory that this process has had."""
    with open("/proc/self/status") as stream:
        lines = dict(line.split(":", 1) for line in stream)
    return float(lines["VmHWM"].split()[0]) * 1024 / MB


def compare(new: Sequence[RunPaths], old: Sequence[RunPaths]) -> dict[str, Any]:
    """Return what the turns of `old` runs cost, and how much more memory than those of `new`."""
    first, second = measure_turns(new), measure_turns(old)
    added = round(second["rss_mb"] - first["rss_mb"], 1)
    return {**second, "added_mb": added, "without_saves": first}


def journal_mb(paths: RunPaths) -> float:
    """Return the size of a run's journals."""
    return round(sum(path.stat().st_size for path in paths.list_journals()) / MB, 1)
