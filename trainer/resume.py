"""Which checkpoint a run goes on from. Free of torch; rank 0 asks and tells the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.history import excluded_checkpoints, load_events
from holdfast.contracts.manifest import Manifest, find_damage, read_manifest
from holdfast.contracts.paths import RunPaths


@dataclass(frozen=True)
class Choice:
    """What to resume from; `skipped` has a line for each newer checkpoint passed over, and why."""

    directory: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...]


def choose(run: RunPaths, *, verify: bool = True) -> Choice:
    """The newest believable checkpoint of the run's current branch; nothing is ever deleted.

    With `verify` every byte is read against the manifest, else sizes alone are compared. A run
    without a checkpoint of its own goes on from the one it was forked from, if it was. Raises
    `DamagedCheckpointError` when that one cannot be believed: to begin from nothing would not
    be what the fork asked for.
    """
    excluded = excluded_checkpoints(load_events(run))
    skipped = []
    for directory in reversed(run.list_checkpoints()):
        if directory.name in excluded:
            skipped.append(f"{directory.name}: excluded by a rollback")
            continue
        manifest, problem = inspect(directory, verify=verify)
        if manifest is not None and problem is None:
            return Choice(directory, manifest, tuple(skipped))
        skipped.append(f"{directory.name}: {problem}")
    record = read_document(RunRecord, run.spec)
    if record is None or not record.forked_path:
        return Choice(None, None, tuple(skipped))
    directory = Path(record.forked_path)
    manifest, problem = inspect(directory, verify=verify)
    if problem is not None:
        raise DamagedCheckpointError(
            f"{directory}: this run was forked from it and has no checkpoint of its own, but "
            f"{problem}; restore the directory or fork another checkpoint",
            damaged=[problem],
        )
    return Choice(directory, manifest, tuple(skipped))


def inspect(directory: Path, *, verify: bool = True) -> tuple[Manifest | None, str | None]:
    """(manifest, None) of a believable checkpoint, else what is wrong with it as the second."""
    try:
        manifest = read_manifest(directory)
    except DamagedCheckpointError as error:
        return None, "damaged: " + "; ".join(error.damaged)
    except OSError as error:
        return None, f"its manifest cannot be read: {error.strerror}"
    if manifest is None:
        return None, "never committed"
    damage = find_damage(directory, manifest, contents=verify)
    return manifest, ("damaged: " + "; ".join(damage)) if damage else None
