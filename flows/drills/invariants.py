"""What must hold of a run whatever happened to it, read from disk and index alone.

Each check returns what it found broken, in words, and changes nothing.
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

from holdfast.contracts.attempt import Submission, read_claim, read_document
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.history import AttemptView, excluded_checkpoints
from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.manifest import find_damage, read_manifest
from holdfast.contracts.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.drills.steps import place_of
from holdfast.lineage import queries
from holdfast.lineage.database import Database, open_database
from holdfast.lineage.disk import survey
from holdfast.lineage.ingest import ingest_run

COMMITTED_STAYS: Final = "no committed checkpoint is lost"
BELIEVED_IS_WHOLE: Final = "nothing half-written is believed"
RESUME_IS_RIGHT: Final = "a resume goes on from the newest believable checkpoint"
STEPS_ARE_RIGHT: Final = "training is the uninterrupted run's"
NO_ORPHANS: Final = "no process outlives its attempt"
ONE_SUBMISSION: Final = "no attempt is submitted twice"
ENDINGS_EXPLAINED: Final = "every ending has a cause"
INDEX_IS_DISK: Final = "the index says what disk says"
ONE_COMMAND: Final = "every launch has the same command"
RECOVERS: Final = "the run recovers as it should"

INDEX_TRIES_MAX: Final = 5


@dataclass(frozen=True)
class Broken:
    """An invariant that did not hold, and what was seen instead."""

    invariant: str
    detail: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def check_checkpoints(
    paths: RunPaths, events: Iterable[Event], *, whole: set[str] | None = None
) -> list[Broken]:
    """Whatever was once committed verifies, or was deleted for a reason.

    `whole` are directories that need not be read again; those found whole are added.
    """
    events = list(events)
    committed = {_named(e) for e in events if e.kind is EventKind.COMMITTED and _named(e)}
    deleted = {
        str(e.data["checkpoint"]): str(e.data.get("reason") or "")
        for e in events
        if e.kind is EventKind.CHECKPOINT_DELETED
    }
    known = set() if whole is None else whole
    broken = []
    for name in sorted(committed):
        problem = _problem_of(paths, name, deleted.get(name), contents=name not in known)
        if problem:
            broken.append(Broken(COMMITTED_STAYS, f"{name}: {problem}"))
        else:
            known.add(name)
    return broken


def _problem_of(paths: RunPaths, name: str, reason: str | None, *, contents: bool) -> str | None:
    """What is wrong with a checkpoint that was committed; a deletion under way is no loss."""
    directory = paths.checkpoint(name)
    try:
        manifest = read_manifest(directory)
    except DamagedCheckpointError as error:
        return str(error)
    damage = find_damage(directory, manifest, contents=contents) if manifest else ["no manifest"]
    if not damage:
        return None
    if not paths.tombstone(name).exists():
        return "; ".join(damage)
    return None if reason else "deleted, and no line of the journal says why"


def check_resumes(paths: RunPaths, events: Sequence[Event]) -> list[Broken]:
    """Each launch went on from a committed checkpoint, and from the newest one there was.

    What it says it passed over as damaged does not count, nor what was deleted or rolled back.
    """
    started = {place_of(e): e.time for e in events if e.kind is EventKind.LAUNCH_STARTED}
    gone = excluded_checkpoints(events) | {
        str(e.data["checkpoint"]) for e in events if e.kind is EventKind.CHECKPOINT_DELETED
    }
    broken = []
    for event in (e for e in events if e.kind is EventKind.RESUMED):
        place, taken = place_of(event), _directory(event.data.get("checkpoint"))
        if taken and not _was_committed(paths, taken):
            broken.append(Broken(BELIEVED_IS_WHOLE, f"{place} went on from {taken}: no manifest"))
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
                Broken(RESUME_IS_RIGHT, f"{place} went on from {taken or 'nothing'}, not {newest}")
            )
    return broken


def check_submissions(paths: RunPaths, events: Sequence[Event]) -> list[Broken]:
    """Attempts, submissions, jobs and claims are one to one, without a gap in the numbers."""
    broken = []
    attempts = paths.list_attempts()
    numbers = [attempt.number for attempt in attempts]
    if numbers != list(range(1, len(numbers) + 1)):
        broken.append(f"attempts are {numbers}")
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
        # What submitit leaves for each job that it hands over, whoever asked it to.
        handed = [p.name for p in sorted(attempt.logs.glob("*_submitted.pkl"))]
        if len(handed) > 1:
            broken.append(f"attempt {attempt.number}: jobs {', '.join(handed)}")
        on_slurm = submission is not None and submission.executor == "slurm"
        if claim and submission and on_slurm and claim.job_id != submission.job_id:
            words = f"job {submission.job_id} was submitted, {claim.job_id} claimed it"
            broken.append(f"attempt {attempt.number}: {words}")
    broken += [f"job {job} is of {count} attempts" for job, count in jobs.items() if count > 1]
    return [Broken(ONE_SUBMISSION, words) for words in broken]


def check_endings(attempts: Sequence[AttemptView], events: Sequence[Event]) -> list[Broken]:
    """Each attempt that is over has one ending, a known cause, and the evidence for it."""
    broken = []
    told = Counter(e.data.get("attempt") for e in events if e.kind is EventKind.ATTEMPT_ENDED)
    for attempt in attempts:
        if not attempt.state.is_terminal:
            continue
        if told[attempt.number] != 1:
            broken.append(f"attempt {attempt.number}: {told[attempt.number]} endings")
        if attempt.state is AttemptState.COMPLETED:
            continue
        if attempt.cause in {None, Cause.UNKNOWN} or not attempt.evidence:
            said = "; ".join(attempt.evidence) or "no evidence"
            broken.append(f"attempt {attempt.number} {attempt.state}: {attempt.cause} ({said})")
    return [Broken(ENDINGS_EXPLAINED, words) for words in broken]


def check_commands(events: Iterable[Event]) -> list[Broken]:
    """Every launch's rank 0 saw the same program arguments and working directory."""
    seen = Counter(e.data.get("command_digest") for e in events if e.kind is EventKind.RESUMED)
    if len(seen) <= 1:
        return []
    return [Broken(ONE_COMMAND, f"{len(seen)} digests: {', '.join(map(str, seen))}")]


def check_index(url: str, paths: RunPaths) -> list[Broken]:
    """The rows kept up to date from line to line are those that a fresh reading gives.

    The folder may change between the two: then both are made again, `INDEX_TRIES_MAX` times.
    Raises `LineageError` when the database at `url` cannot be used.
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
            return [Broken(INDEX_IS_DISK, words) for words in _differing(kept, again)]
    return []


def _rows_of(database: Database, paths: RunPaths, now: float) -> dict[str, Any]:
    name = str(paths.directory)
    ask: dict[str, Callable[..., Any]] = {
        "run": lambda: queries.show_run(database, name, now=now),
        "checkpoints": lambda: queries.list_checkpoints(database, name),
        "lineage": lambda: queries.lineage_graph(database, name),
    }
    return {what: json.loads(json.dumps(look(), default=str)) for what, look in ask.items()}


def _differing(kept: dict[str, Any], again: dict[str, Any]) -> list[str]:
    return [
        f"{what}: the index has {_first_difference(kept[what], again[what])}"
        for what in kept
        if kept[what] != again[what]
    ]


def _first_difference(kept: Any, again: Any, where: str = "") -> str:
    """The innermost place where two JSON values differ."""
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
    """`run:directory` or `directory` → the directory's name; empty for none."""
    return str(identity or "").rpartition(":")[2]


def _step(name: str) -> int:
    parsed = CheckpointName.parse(name)
    return parsed.step if parsed else -1
