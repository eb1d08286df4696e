"""The invariants of a run, checked from disk and index.

Each check returns the broken invariants with a description, and changes nothing.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.errors import DamagedCheckpointError, HoldfastError
from holdfast.contracts.records.documents import Submission, read_claim, read_document
from holdfast.contracts.records.history import (
    AttemptView,
    RunHistory,
    excluded_checkpoints,
    load_events,
)
from holdfast.contracts.states import AttemptState, Cause
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.ingest.disk import survey
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries import pages, run_queries
from holdfast_bench.live_drills.process_list import place_of

COMMITTED_STAYS: Final = "no committed checkpoint is lost"
BELIEVED_IS_WHOLE: Final = "no unfinished checkpoint is loaded"
RESUME_IS_RIGHT: Final = "a resume uses the newest valid checkpoint"
STEPS_ARE_RIGHT: Final = "training matches the uninterrupted run"
NO_ORPHANS: Final = "no process outlives its attempt"
ONE_SUBMISSION: Final = "no attempt is submitted twice"
ENDINGS_EXPLAINED: Final = "every ending has a cause"
INDEX_IS_DISK: Final = "the index matches the disk"
ONE_COMMAND: Final = "every launch has the same command"
RECOVERS: Final = "the run recovers as expected"

INDEX_TRIES_MAX: Final = 5


@dataclass(frozen=True)
class Broken:
    """A broken invariant, and what was found."""

    invariant: str
    detail: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def check_checkpoints(
    paths: RunPaths, events: Iterable[Event], *, whole: set[str] | None = None
) -> list[Broken]:
    """Check that every committed checkpoint verifies, or was deleted for a reason.

    `whole` are directories whose contents need not be read again. Intact directories are added.
    """
    events = list(events)
    committed = {_named(e) for e in events if e.kind is EventKind.COMMITTED and _named(e)}
    deleted = _deletions(events)
    known = set() if whole is None else whole
    broken = []
    for name in sorted(committed):
        problem = _damage_of(paths, name, contents=name not in known)
        if problem and paths.tombstone(name).exists():
            if not deleted.get(name):
                # Deleted since `events` were read. The line is older than the tombstone.
                deleted = _deletions(load_events(paths))
            problem = None if deleted.get(name) else "deleted, and the journal has no reason"
        if problem:
            broken.append(Broken(COMMITTED_STAYS, f"{name}: {problem}"))
        else:
            known.add(name)
    return broken


def _deletions(events: Iterable[Event]) -> dict[str, str]:
    """Return the reason of each deletion by the checkpoint's directory name."""
    return {
        str(e.data["checkpoint"]): str(e.data.get("reason") or "")
        for e in events
        if e.kind is EventKind.CHECKPOINT_DELETED
    }


def _damage_of(paths: RunPaths, name: str, *, contents: bool) -> str | None:
    directory = paths.checkpoint(name)
    try:
        manifest = read_manifest(directory)
    except DamagedCheckpointError as error:
        return str(error)
    damage = find_damage(directory, manifest, contents=contents) if manifest else ["no manifest"]
    return "; ".join(damage) or None


def check_resumes(paths: RunPaths, events: Sequence[Event]) -> list[Broken]:
    """Check that each launch resumed from the newest committed checkpoint.

    Checkpoints that it skipped as damaged do not count, nor do deleted or rolled-back ones.
    """
    started = {place_of(e): e.time for e in events if e.kind is EventKind.LAUNCH_STARTED}
    gone = excluded_checkpoints(events) | {
        str(e.data["checkpoint"]) for e in events if e.kind is EventKind.CHECKPOINT_DELETED
    }
    broken = []
    for event in (e for e in events if e.kind is EventKind.RESUMED):
        place, taken = place_of(event), _directory(event.data.get("checkpoint"))
        if taken and not _was_committed(paths, taken):
            broken.append(
                Broken(BELIEVED_IS_WHOLE, f"{place} resumed from {taken}, which has no manifest")
            )
        skipped = {str(line).partition(":")[0] for line in event.data.get("skipped", ())}
        before = started.get(place, event.time)
        there = [
            name
            for e in events
            if e.kind is EventKind.COMMITTED and e.time < before
            for name in [_named(e)]
            if name and name not in gone | skipped
        ]
        newest = max(there, key=_step, default="")
        if newest and int(event.data.get("step", 0)) < _step(newest):
            broken.append(
                Broken(RESUME_IS_RIGHT, f"{place} resumed from {taken or 'nothing'}, not {newest}")
            )
    return broken


def check_submissions(paths: RunPaths, events: Sequence[Event]) -> list[Broken]:
    """Check that attempts, submissions, jobs and claims match one to one, without gaps."""
    broken = []
    attempts = paths.list_attempts()
    numbers = [attempt.number for attempt in attempts]
    if numbers != list(range(1, len(numbers) + 1)):
        broken.append(f"the attempt numbers are {numbers}")
    for kind in (EventKind.ATTEMPT_RESERVED, EventKind.ATTEMPT_SUBMITTED, EventKind.CLAIMED):
        counts = Counter(e.data.get("attempt") for e in events if e.kind is kind)
        twice = [f"attempt {n} was {kind.value} {c} times" for n, c in counts.items() if c > 1]
        broken += twice
    jobs: Counter[str] = Counter()
    for attempt in attempts:
        submission = read_document(Submission, attempt.submission)
        claim = read_claim(attempt)
        if submission is not None:
            jobs[submission.job_id] += 1
        # submitit writes one such file for each job that it submits.
        handed = [p.name for p in sorted(attempt.logs.glob("*_submitted.pkl"))]
        if len(handed) > 1:
            broken.append(f"attempt {attempt.number}: jobs {', '.join(handed)}")
        on_slurm = submission is not None and submission.executor == "slurm"
        if claim and submission and on_slurm and claim.job_id != submission.job_id:
            text = f"job {submission.job_id} was submitted, but job {claim.job_id} claimed it"
            broken.append(f"attempt {attempt.number}: {text}")
    broken += [f"job {job} has {count} attempts" for job, count in jobs.items() if count > 1]
    return [Broken(ONE_SUBMISSION, text) for text in broken]


def check_endings(attempts: Sequence[AttemptView], events: Sequence[Event]) -> list[Broken]:
    """Check that each ended attempt has one ending, a known cause and evidence for it."""
    broken = []
    ends = Counter(e.data.get("attempt") for e in events if e.kind is EventKind.ATTEMPT_ENDED)
    for attempt in attempts:
        if not attempt.state.is_terminal:
            continue
        if ends[attempt.number] != 1:
            broken.append(f"attempt {attempt.number}: {ends[attempt.number]} endings")
        if attempt.state is AttemptState.COMPLETED:
            continue
        if attempt.cause in {None, Cause.UNKNOWN} or not attempt.evidence:
            evidence = "; ".join(attempt.evidence) or "no evidence"
            broken.append(f"attempt {attempt.number} {attempt.state}: {attempt.cause} ({evidence})")
    return [Broken(ENDINGS_EXPLAINED, text) for text in broken]


def check_commands(events: Iterable[Event]) -> list[Broken]:
    """Check that rank 0 of every launch had the same arguments and working directory."""
    seen = Counter(e.data.get("command_digest") for e in events if e.kind is EventKind.RESUMED)
    if len(seen) <= 1:
        return []
    return [Broken(ONE_COMMAND, f"{len(seen)} digests: {', '.join(map(str, seen))}")]


def check_records(
    url: str, paths: RunPaths, events: Sequence[Event], history: RunHistory
) -> list[Broken]:
    """Check resumes, endings, commands, and the index at `url` against the disk."""
    broken = [
        *check_resumes(paths, events),
        *check_endings(history.attempts, history.events),
        *check_commands(events),
    ]
    try:
        return broken + check_index(url, paths)
    except HoldfastError as error:
        return [*broken, Broken(INDEX_IS_DISK, str(error))]


def check_index(url: str, paths: RunPaths) -> list[Broken]:
    """Check that the incrementally updated rows equal those of a fresh ingest.

    If the folder changes in between, both are repeated, up to `INDEX_TRIES_MAX` times. Raises
    `LineageError` if the database at `url` cannot be used.
    """
    now = time.time()
    for _ in range(INDEX_TRIES_MAX):
        before = survey(paths).fingerprint
        with open_database(url) as database:
            ingest_run(database, paths)
            kept = _rows_of(database, paths, now)
        with (
            TemporaryDirectory(prefix="holdfast-drill-") as folder,
            open_database(f"sqlite:///{folder}/fresh.db") as fresh,
        ):
            ingest_run(fresh, paths, fresh=True)
            again = _rows_of(fresh, paths, now)
        if survey(paths).fingerprint == before:
            return [Broken(INDEX_IS_DISK, text) for text in _differing(kept, again)]
    return []


def _rows_of(database: Database, paths: RunPaths, now: float) -> dict[str, Any]:
    name = str(paths.directory)
    ask: dict[str, Callable[..., Any]] = {
        "run": lambda: run_queries.show_run(database, name, now=now),
        "checkpoints": lambda: pages.list_checkpoints(database, name, limit=None).items,
        "lineage": lambda: run_queries.lineage_graph(database, name),
    }
    return {what: json.loads(json.dumps(look(), default=str)) for what, look in ask.items()}


def _differing(kept: dict[str, Any], again: dict[str, Any]) -> list[str]:
    return [
        f"{what}: the index has {_first_difference(kept[what], again[what])}"
        for what in kept
        if kept[what] != again[what]
    ]


def _first_difference(kept: Any, again: Any, where: str = "") -> str:
    """Return the innermost difference between two JSON values."""
    if isinstance(kept, dict) and isinstance(again, dict):
        key = next(k for k in [*kept, *again] if kept.get(k) != again.get(k))
        return _first_difference(kept.get(key), again.get(key), f"{where}.{key}")
    if isinstance(kept, list) and isinstance(again, list) and len(kept) == len(again):
        at = next(i for i, pair in enumerate(zip(kept, again, strict=True)) if pair[0] != pair[1])
        return _first_difference(kept[at], again[at], f"{where}[{at}]")
    return f"{str(kept)[:200]} at {where or 'the top'}, disk {str(again)[:200]}"


def _was_committed(paths: RunPaths, name: str) -> bool:
    manifest: Path = paths.checkpoint(name) / MANIFEST
    return manifest.exists() or paths.tombstone(name).exists()


def _named(event: Event) -> str:
    return _directory(event.data.get("checkpoint"))


def _directory(identity: object) -> str:
    """Return the directory name of `run:directory` or `directory`; empty for none."""
    return str(identity or "").rpartition(":")[2]


def _step(name: str) -> int:
    parsed = CheckpointName.parse(name)
    return parsed.step if parsed else -1
