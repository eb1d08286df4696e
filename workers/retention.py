"""Which checkpoints are kept and why, and which are not. Each answer carries its reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast.contracts.history import (
    RunHistory,
    excluded_checkpoints,
    load_history,
    pinned_checkpoints,
)
from holdfast.contracts.journal import EventKind
from holdfast.contracts.manifest import Manifest, find_damage
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.spec import Keep
from holdfast.workers.checkpoints import committed_checkpoints


def plan_prune(
    manifests: Sequence[Manifest],
    *,
    keep: Keep,
    pins: Collection[str] = (),
    in_use: Collection[str] = (),
    excluded: Collection[str] = (),
    damaged: Collection[str] = (),
) -> list[tuple[str, str | None]]:
    """(directory name, why it is to be deleted or None) for each checkpoint, oldest step first.

    `in_use` are parents of live attempts, of forks and of exports. A checkpoint that a rollback
    `excluded` does not count among the last ones, nor does a `damaged` one, which stays for people
    to look at. Without a `keep.last` nothing is deleted.
    """
    ordered = sorted(manifests, key=lambda m: (m.step, m.attempt, m.incarnation))
    branch = [m for m in ordered if m.name not in {*excluded, *damaged}]
    newest = {m.name for m in branch[-(keep.last or len(branch) or 1) :]}
    return [
        (m.name, _reason(m, keep, newest, {*pins, *in_use, *damaged}, excluded)) for m in ordered
    ]


def _reason(
    manifest: Manifest,
    keep: Keep,
    newest: Collection[str],
    needed: Collection[str],
    excluded: Collection[str],
) -> str | None:
    """Why one checkpoint is to be deleted, or None when something keeps it."""
    if keep.last is None or manifest.name in newest or manifest.name in needed:
        return None
    if manifest.name in excluded:
        return f"keep.last {keep.last}: step {manifest.step} was rolled back"
    if keep.every_steps and manifest.step % keep.every_steps == 0:
        return None
    every = f" and not a multiple of {keep.every_steps}" if keep.every_steps else ""
    return f"keep.last {keep.last}: step {manifest.step} is older{every}"


def parents_in_use(history: RunHistory) -> frozenset[str]:
    """Directory names that a live attempt resumed from, or that a fork or an export needs."""
    names = set()
    for attempt in history.attempts:
        if not attempt.state.is_terminal and attempt.resumed_from:
            names.add(attempt.resumed_from.rpartition(":")[2])
    for event in history.events:
        if event.kind is EventKind.FORKED:
            names.add(str(event.data["checkpoint"]).rpartition(":")[2])
    return frozenset(names)


def plan_run(paths: RunPaths) -> list[tuple[str, str | None]]:
    """`plan_prune` for a run on disk, by its own keep rules."""
    history = load_history(paths)
    manifests = committed_checkpoints(paths)
    # Sizes alone: cheap enough after every commit, and what a torn or emptied file shows.
    damaged = {
        m.name for m in manifests if find_damage(paths.checkpoint(m.name), m, contents=False)
    }
    return plan_prune(
        manifests,
        keep=history.spec.checkpoint.keep,
        pins=pinned_checkpoints(history.events),
        in_use=parents_in_use(history),
        excluded=excluded_checkpoints(history.events),
        damaged=damaged,
    )


def apply(paths: RunPaths, *, by: str, writer: str = "flow") -> list[tuple[str, str, int]]:
    """Delete what the keep rules let go; returns (directory name, reason, bytes) for each."""
    from holdfast.workers.operator import delete_checkpoint

    deleted = []
    for name, reason in plan_run(paths):
        if reason is not None:
            freed = delete_checkpoint(paths, name, reason=reason, by=by, writer=writer)
            deleted.append((name, reason, freed))
    return deleted
