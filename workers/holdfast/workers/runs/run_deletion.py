"""Delete an ended run with everything in its folder.

One rename decides: the folder gets a name that no run can have. A process that is killed after it
leaves a folder that the next deletion in this root removes. The locks of the supervisor and of the
orders are held until then, so no order is accepted and no supervisor starts meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk import durable, file_locks, leases, manifest, reading, visits
from holdfast.contracts.disk.paths import OF_RUN, RunPaths, real_folder
from holdfast.contracts.errors import RunConflictError
from holdfast.contracts.records import history, orders
from holdfast.contracts.records.documents import RunRecord
from holdfast.workers.runs.run_folders import read_record, require_own

# No run's name begins with a dot.
DELETED: Final = ".deleted-"


def delete_run(paths: RunPaths, *, dry_run: bool) -> dict[str, Any]:
    """Delete the run and return the facts of `delete --json`; with `dry_run`, delete nothing.

    Copies in a mirror remain. Raises `RunConflictError` if the run has not ended, has a supervisor,
    or if a pin, a reader or a fork needs one of its checkpoints, and `SpecError` for another
    user's run.
    """
    require_own(paths)
    record = read_record(paths)
    kept = manifest.committed_checkpoints(paths)
    facts = {
        "run": paths.name,
        "uid": record.uid,
        "directory": str(paths.directory),
        "dry_run": dry_run,
        "checkpoints": len(kept),
        "bytes": sum(one.bytes for one in kept),
        "mirror": (record.spec.get("checkpoint") or {}).get("mirror"),
    }
    with _alone(paths):
        _refuse_if_needed(paths, record)
        if dry_run:
            return facts
        gone = paths.directory.with_name(f"{DELETED}{paths.name}-{record.uid}")
        os.rename(paths.directory, gone)
        # Before any byte goes. Otherwise a power cut could bring back a run that lacks files.
        durable.fsync_directory(gone.parent)
    _remove_deleted(paths.directory.parent)
    return facts


@contextlib.contextmanager
def _alone(paths: RunPaths) -> Iterator[None]:
    """Hold the locks of a run that has ended. Raises `RunConflictError` for another run."""
    with (
        file_locks.locked(paths.flow_lock, 0.0, owner_only=True) as is_locked,
        orders.open_orders(paths) if is_locked else contextlib.nullcontext(),
    ):
        state = history.load_history(paths).state
        if state.is_live or not is_locked:
            has = f"is {state}" if state.is_live else "still has a supervisor"
            raise RunConflictError(
                f"{paths.name} {has}, and only a run that has ended can be deleted. End it with "
                f"`holdfast cancel {paths.name}`, and wait with `holdfast wait {paths.name}`"
            )
        yield


def _refuse_if_needed(paths: RunPaths, record: RunRecord) -> None:
    """Raise `RunConflictError` if a pin, a reader or a fork needs one of the run's checkpoints."""
    if pinned := sorted(history.pinned_checkpoints(history.load_history(paths).events)):
        raise RunConflictError(
            f"{paths.name}: {', '.join(pinned)} is pinned. Remove the pin with "
            f"`holdfast unpin {paths.name}:{pinned[0]}` first"
        )
    for directory in paths.list_checkpoints():
        if who := leases.readers(directory):
            raise RunConflictError(
                f"{paths.name}: {directory.name} is being read by {', '.join(who)}. Try again when "
                "that has ended"
            )
    if forks := _forks_without_checkpoints(paths, record.uid):
        raise RunConflictError(
            f"{', '.join(forks)} is a fork of {paths.name} and has no checkpoint of its own yet. "
            "Delete the fork first, or let it save"
        )


def _forks_without_checkpoints(paths: RunPaths, uid: str) -> list[str]:
    """Return this user's forks that still need the run. Nobody else's folder can keep it."""

    def needs_it(other: RunPaths) -> bool:
        return read_record(other).forked_uid == uid and not manifest.committed_checkpoints(other)

    runs = visits.own_runs(paths.directory.parent)
    return [one.paths.name for one in visits.visit(runs, needs_it) if one.result]


def _remove_deleted(root: Path) -> None:
    """Remove this user's deleted runs in `root`, including those that a killed process left."""
    for folder in sorted(root.glob(f"{DELETED}*")):
        if not reading.is_mine(folder) or folder.is_symlink():
            continue
        checkpoints = folder / "checkpoints"
        if checkpoints.is_symlink():
            # `checkpoint.directory`: its folder has a link back to the run's.
            target = real_folder(checkpoints).parent
            # Nothing is deleted in a folder that does not lead back to this user's run, see
            # decision 64.
            if target != folder and reading.is_mine(target) and (target / OF_RUN).is_symlink():
                shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    durable.fsync_directory(root)
