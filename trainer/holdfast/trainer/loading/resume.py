"""The choice of the checkpoint from which a run resumes. Rank 0 chooses, without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.contracts.disk.damage import find_damage, word_for
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.retries import read_again
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.records.attempt import RunRecord, read_document
from holdfast.contracts.records.history import excluded_checkpoints, load_events
from holdfast.contracts.records.known_damage import damaged_checkpoints

Find = Callable[[Path, Manifest], list[str]]


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from. `skipped` has a line with the reason for each newer one."""

    directory: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...]


def choose(
    run: RunPaths,
    *,
    verify: bool = False,
    passing_over: Mapping[str, str] | None = None,
    find: Find = find_damage,
    start_from: Path | None = None,
) -> Choice:
    """Return the newest checkpoint of the run's current branch that verifies. Deletes nothing.

    Normally only sizes are compared here, because the load verifies the contents. With `verify`,
    every byte is read. `passing_over` maps directories that turned out damaged to the damage. The
    last remaining candidate is always read, because after a failed load the process cannot start
    over. One that was found damaged before is read too. A run without a checkpoint of its own
    resumes from the checkpoint that it was forked from, or from `start_from`. Raises
    `DamagedCheckpointError` if that one is damaged, because a start from nothing is not what was
    asked for.
    """
    passed = passing_over or {}
    record = read_document(RunRecord, run.spec)
    origin = Path(record.forked_path) if record is not None and record.forked_path else start_from
    uid = record.uid if record is not None else None
    skipped: list[str] = []
    events = load_events(run)
    known = damaged_checkpoints(events)
    candidates = _candidates(run, uid, excluded_checkpoints(events), passed, skipped)
    found = next(candidates, None)
    while found is not None:
        directory, manifest = found
        before = len(skipped)
        following = next(candidates, None)
        is_last = following is None and origin is None
        # If it was found damaged before, its files may have been restored since.
        must_read = verify or is_last or directory.name in known
        damage = find(directory, manifest) if must_read else []
        if not damage:
            return Choice(directory, manifest, tuple(skipped[:before]))
        skipped.insert(before, f"{directory.name}: {_describe(damage)}")
        found = following
    if origin is None:
        return Choice(None, None, tuple(skipped))
    manifest_of_origin, problem = inspect(origin, verify=verify)
    problem = passed.get(str(origin), problem)
    if problem is not None:
        raise DamagedCheckpointError(
            f"{origin}: this run {'starts' if origin == start_from else 'was forked'} from it and "
            f"has no checkpoint of its own, but {problem}; restore the directory or start from "
            "another checkpoint",
            damaged=[problem],
        )
    return Choice(origin, manifest_of_origin, tuple(skipped))


def _candidates(
    run: RunPaths,
    uid: str | None,
    excluded: Collection[str],
    passed: Mapping[str, str],
    skipped: list[str],
) -> Iterator[tuple[Path, Manifest]]:
    """Yield checkpoints that look complete, newest first. Add a line to `skipped` for others."""
    for directory in reversed(run.list_checkpoints()):
        if directory.name in excluded:
            skipped.append(f"{directory.name}: excluded by a rollback")
            continue
        manifest, problem = inspect(directory, verify=False, run_uid=uid)
        problem = passed.get(str(directory), problem)
        if manifest is not None and problem is None:
            yield directory, manifest
        else:
            skipped.append(f"{directory.name}: {problem}")


def inspect(
    directory: Path, *, verify: bool = True, run_uid: str | None = None
) -> tuple[Manifest | None, str | None]:
    """Return (manifest, None) for a valid checkpoint, or (manifest or None, problem).

    With `run_uid`, the manifest must belong to that run.
    """
    try:
        manifest = read_again(lambda: read_manifest(directory))
    except DamagedCheckpointError as error:
        return None, _describe(error.damaged)
    except OSError as error:
        return None, f"its manifest cannot be read: {error.strerror}"
    if manifest is None:
        return None, "never committed"
    if run_uid is not None and manifest.run_uid != run_uid:
        return manifest, f"damaged: its manifest belongs to another run, {manifest.run}"
    if manifest.source is not None:
        return manifest, f"written by the program itself, in its own format, in {manifest.source}"
    damage = find_damage(directory, manifest, contents=verify)
    return manifest, _describe(damage) if damage else None


def _describe(damage: Iterable[str]) -> str:
    lines = list(damage)
    return f"{word_for(lines)}: {'; '.join(lines)}"
