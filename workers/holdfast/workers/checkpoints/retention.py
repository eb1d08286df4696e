"""Decide which checkpoints are kept, with a reason for each.

The decision is a pure function of gathered facts. First come the checkpoints that must never be
deleted (`protections`), then the spec's keep rules (`contracts.keep_rules`). Others are deleted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import leases, mirrors
from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.records import consumers, history_cache, known_damage, reported
from holdfast.contracts.records.history import (
    RunHistory,
    blamed_checkpoints,
    excluded_checkpoints,
    pinned_checkpoints,
)
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.spec.keep_rules import kept_by_rules, why_not_kept

NEWEST: Final = "the newest"
OWN: Final = "the program's own, which only the program deletes"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about a run's checkpoints besides their manifests, by directory name.

    `in_use` names what needs a checkpoint, `read` which process reads it, and `damaged` its
    damage. `blamed` ones are excluded, and kept for inspection. `mirrored` has the checkpoints with
    a durable second copy. It is None if the spec requests no copy.
    """

    pins: Collection[str] = ()
    in_use: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)
    excluded: Collection[str] = ()
    blamed: Collection[str] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    mirrored: Collection[str] | None = None


@dataclass(frozen=True, kw_only=True)
class KeepVerdict:
    """Whether one checkpoint is kept, and why. `step` and `bytes` are the manifest's."""

    name: str
    step: int
    bytes: int
    is_kept: bool
    reason: str


def plan_prune(
    manifests: Sequence[Manifest], *, keep: Keep, facts: Facts, now: float
) -> list[KeepVerdict]:
    """Return a verdict on each checkpoint, oldest step first; `now` is Unix seconds.

    A checkpoint that a rollback excluded does not count for the rules. Neither does a damaged one,
    which is kept for inspection. Without a keep rule nothing is deleted.
    """
    ordered = sorted(manifests, key=_order)
    branch = _branch(ordered, facts)
    ruled = kept_by_rules(branch, keep, now=now)
    protected = protections(ordered, branch, facts)
    verdicts = []
    for one in ordered:
        reasons = [*protected[one.name], *ruled.get(one.name, ())]
        if not reasons and not keep.is_limited:
            reasons = ["all"]
        why = ", ".join(reasons) or _why_deleted(one, keep, facts)
        verdicts.append(
            KeepVerdict(
                name=one.name, step=one.step, bytes=one.bytes, is_kept=bool(reasons), reason=why
            )
        )
    return verdicts


def protections(
    ordered: Sequence[Manifest], branch: Sequence[Manifest], facts: Facts
) -> dict[str, list[str]]:
    """Return why checkpoints may not be deleted whatever the keep rules say, by directory name."""
    reasons_of: dict[str, list[str]] = {one.name: [] for one in ordered}
    if branch:
        # What the run would resume from. It is kept whatever the rules say.
        reasons_of[branch[-1].name].append(NEWEST)
    if facts.mirrored is not None:
        # Until a later one has its second copy, this one may be all that survives a lost disk.
        copied = [place for place, one in enumerate(branch) if one.name in facts.mirrored]
        for one in branch[copied[-1] if copied else 0 : -1]:
            reasons_of[one.name].append("needed until a newer checkpoint has a second copy")
    for one in ordered:
        if one.source is not None:
            reasons_of[one.name].append(OWN)
        if one.name in facts.pins:
            reasons_of[one.name].append("pinned")
        if one.name in facts.in_use:
            reasons_of[one.name].append(facts.in_use[one.name])
        if one.name in facts.read:
            reasons_of[one.name].append(f"being read by {facts.read[one.name]}")
        if one.name in facts.blamed:
            reasons_of[one.name].append("blamed for crashes, kept for inspection")
        if one.name in facts.damaged:
            reasons_of[one.name].append(f"damaged, kept for inspection: {facts.damaged[one.name]}")
    return reasons_of


def checkpoints_in_use(history: RunHistory) -> dict[str, str]:
    """Return the checkpoints in use, each with its use, by directory name.

    A checkpoint is in use if a live attempt resumed from it, a fork started from it, an export of
    it still exists, or a consumer of the spec needs it.
    """
    uses = {
        use.checkpoint: f"needed by the consumer {use.consumer}"
        for use in consumers.open_uses(
            consumers.uses_in(history.lines.of_kinds(EventKind.CONSUMER))
        )
    }
    for event in history.events:
        if event.kind is EventKind.FORKED:
            # A fork that has not saved yet resumes from this one.
            into = event.data.get("into_run") or "another run"
            uses[_name_in(event)] = f"the parent of run {into}"
        # A folder that an export links to would break, see decision 73.
        elif event.kind is EventKind.EXPORTED and Path(str(event.data.get("path", ""))).exists():
            uses[_name_in(event)] = f"exported to {event.data['path']}"
    for attempt in history.attempts:
        if not attempt.state.is_terminal:
            resumed = [
                event
                for event in history.events
                if event.kind is EventKind.RESUMED and event.data.get("attempt") == attempt.number
            ]
            # Each launch resumes again, so only the newest launch's checkpoint is needed.
            if resumed and resumed[-1].data.get("checkpoint"):
                uses[_name_in(resumed[-1])] = (
                    f"the checkpoint that attempt {attempt.number} resumed from"
                )
    return uses


def gather(history: RunHistory, manifests: Sequence[Manifest]) -> Facts:
    """Gather the facts of a run on disk. Files' sizes are checked, their contents are not."""
    paths = history.paths
    read = {one.name: leases.readers(paths.checkpoint(one.name)) for one in manifests}
    damage = {
        one.name: find_damage(paths.checkpoint(one.name), one, contents=False)
        for one in manifests
        # With a node-local tier the files are on the nodes, which cannot be checked here.
        if history.spec.checkpoint.local is None
    }
    return Facts(
        pins=pinned_checkpoints(history.events),
        in_use=checkpoints_in_use(history),
        read={name: ", ".join(who) for name, who in read.items() if who},
        excluded=excluded_checkpoints(history.events),
        blamed=blamed_checkpoints(history.events),
        damaged=known_damage.damaged_checkpoints(history.events)
        | {name: lines[0] for name, lines in damage.items() if lines},
        mirrored=_mirrored(history, manifests),
    )


def _mirrored(history: RunHistory, manifests: Sequence[Manifest]) -> frozenset[str] | None:
    """Return the checkpoints that are in the run's mirror; None if its spec has no mirror."""
    if history.spec.checkpoint.mirror is None:
        return None
    paths = history.paths
    return frozenset(m.name for m in manifests if mirrors.read_record(paths.checkpoint(m.name)))


def plan_run(
    paths: RunPaths, history: RunHistory | None = None, keep: Keep | None = None
) -> list[KeepVerdict]:
    """Return `plan_prune` of a run on disk by its keep rules, including unreadable manifests.

    `keep` replaces the rules of the run's spec. `history` is what the caller has just read of the
    run. Raises like `load_history`.
    """
    history = replace(history, paths=paths) if history else history_cache.load_tallied(paths)
    manifests, unreadable = _read_manifests(paths)
    verdicts = plan_prune(
        reported.with_reported(manifests, history.events),
        keep=keep or history.spec.checkpoint.keep,
        facts=gather(history, manifests),
        now=time.time(),
    )
    return [*verdicts, *unreadable]


def _read_manifests(paths: RunPaths) -> tuple[list[Manifest], list[KeepVerdict]]:
    """Return every valid manifest, and a verdict on each invalid one, which is kept."""
    manifests, unreadable = [], []
    for directory in paths.list_checkpoints():
        try:
            manifest = read_manifest(directory)
        except DamagedCheckpointError as error:
            why = f"damaged, kept for inspection: {'; '.join(error.damaged) or MANIFEST}"
            step = int(directory.name[len("step-") :].partition(".")[0])
            unreadable.append(
                KeepVerdict(name=directory.name, step=step, bytes=0, is_kept=True, reason=why)
            )
            continue
        if manifest is not None:
            manifests.append(manifest)
    return manifests, unreadable


def _why_deleted(one: Manifest, keep: Keep, facts: Facts) -> str:
    if one.name in facts.excluded:
        return "rolled back"
    return why_not_kept(one, keep)


def _branch(ordered: Sequence[Manifest], facts: Facts) -> list[Manifest]:
    """Return the checkpoints that the run may resume from."""
    # A damaged checkpoint does not count as the newest, or the rules would delete the last good
    # one.
    return [one for one in ordered if one.name not in {*facts.excluded, *facts.damaged}]


def _order(one: Manifest) -> tuple[int, int, int]:
    return one.step, one.attempt, one.launch


def _name_in(event: Event) -> str:
    """Return the directory name in an event that names a checkpoint by id or by name."""
    return str(event.data["checkpoint"]).rpartition(":")[2]
