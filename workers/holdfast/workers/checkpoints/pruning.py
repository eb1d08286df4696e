"""The command `prune`: delete a run's checkpoints by its keep rules, or only list them."""

from __future__ import annotations

from typing import Any, Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.workers.checkpoints import deletion, retention
from holdfast.workers.checkpoints.retention import Verdict

OVERTAKEN: Final = "a reader or a pin appeared meanwhile, or another process is deleting it"


def prune(
    paths: RunPaths, *, by: str, writer: str = "cli", dry_run: bool, keep: Keep | None = None
) -> dict[str, Any]:
    """Prune the run and return the facts of `prune --json`; with `dry_run`, delete nothing.

    `keep` replaces the rules of the run's spec.
    """
    plan = retention.plan_run(paths, keep=keep)
    deleted_names = {one.name for one in plan if not one.is_kept}
    if not dry_run:
        deleted_names = {one.name for one in deletion.apply(paths, by=by, writer=writer, keep=keep)}
    deleted = [_facts(one, one.reason) for one in plan if one.name in deleted_names]
    kept = [
        _facts(one, one.reason if one.is_kept else OVERTAKEN)
        for one in plan
        if one.name not in deleted_names
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
