"""Reasons why checkpoints are kept or were deleted. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.spec.keep_rules import kept_by_rules
from holdfast.lineage.database.states import CheckpointState

Row = Mapping[str, Any]

NOTHING_KEEPS: Final = "no rule keeps it; the next prune deletes it"


@dataclass(frozen=True)
class _Candidate:
    """The facts of a checkpoint that the keep rules need."""

    name: str
    step: int
    committed_at: float
    metrics: Mapping[str, float]


def candidates(checkpoints: Sequence[Row]) -> list[_Candidate]:
    """Return those of `checkpoints` that the run can resume from, as the keep rules read them."""
    return [
        _Candidate(row["name"], row["step"], row["committed_at"] or 0.0, row["metrics"] or {})
        for row in checkpoints
        if row["state"] == CheckpointState.COMMITTED and not row["rolled_back"]
    ]


def explain(
    checkpoints: Sequence[Row],
    uses: Mapping[str, Sequence[str]],
    keep: Keep,
    *,
    branch: Sequence[Row] | None = None,
    now: float | None = None,
) -> list[str]:
    """Return a reason for each of `checkpoints`, which belong to one run, oldest first.

    If `checkpoints` are only a part of the run, `branch` must contain all checkpoints that the
    run can resume from, oldest first. The newest is enough if no rule limits what is kept. `uses`
    has other uses by directory name, such as `parent of run b`. `now` is Unix seconds; by default
    it is the current time.
    """
    on_branch = candidates(checkpoints if branch is None else branch)
    ruled = kept_by_rules(on_branch, keep, now=time.time() if now is None else now)
    newest = on_branch[-1].name if on_branch else None
    return [
        _explain(row, row["name"] == newest, uses.get(row["name"], ()), ruled, keep)
        for row in checkpoints
    ]


def _explain(
    row: Row, is_newest: bool, uses: Sequence[str], ruled: Mapping[str, Sequence[str]], keep: Keep
) -> str:
    if row["state"] == CheckpointState.DELETED:
        return f"deleted: {row['deleted_reason'] or 'no reason was recorded'}"
    reasons = []
    if row["state"] == CheckpointState.DAMAGED:
        reasons.append(f"damaged: {row['detail']}")
    if row["rolled_back"]:
        reasons.append("rolled back")
    if is_newest:
        reasons.append("newest")
    if row["pinned"]:
        reasons.append("pinned")
    reasons.extend(uses)
    rules = ruled.get(row["name"], () if keep.is_limited else ("all",))
    if rules == ("all",):
        reasons.append("no keep rule set")
    elif rules:
        reasons.append(f"kept by rule: {', '.join(rules)}")
    return ", ".join(reasons) or NOTHING_KEEPS
