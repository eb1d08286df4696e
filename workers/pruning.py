"""What `prune` does and says: the plan of a run's checkpoints, carried out or only told."""

from __future__ import annotations

from typing import Any, Final

from holdfast.contracts.paths import RunPaths
from holdfast.workers import deletion, retention
from holdfast.workers.retention import Verdict

OVERTAKEN: Final = "a reader or a pin came in between, or another process deletes it"


def prune(paths: RunPaths, *, by: str, writer: str = "cli", dry_run: bool) -> dict[str, Any]:
    """The facts of `holdfast prune --json`; with `dry_run` nothing is deleted."""
    plan = retention.plan_run(paths)
    gone = {one.name for one in plan if not one.is_kept}
    if not dry_run:
        gone = {one.name for one in deletion.apply(paths, by=by, writer=writer)}
    deleted = [_facts(one, one.reason) for one in plan if one.name in gone]
    kept = [
        _facts(one, one.reason if one.is_kept else OVERTAKEN)
        for one in plan
        if one.name not in gone
    ]
    return {
        "run": paths.name,
        "dry_run": dry_run,
        "deleted": deleted,
        "kept": kept,
        "bytes_deleted": sum(one["bytes"] for one in deleted),
        "bytes_kept": sum(one["bytes"] for one in kept),
    }


def _facts(verdict: Verdict, reason: str) -> dict[str, Any]:
    return {
        "checkpoint": verdict.name,
        "step": verdict.step,
        "bytes": verdict.bytes,
        "reason": reason,
    }
