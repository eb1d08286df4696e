"""Why a checkpoint is still there, or why it is not. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.keep_rules import kept_by_rules
from holdfast.contracts.spec import Keep
from holdfast.lineage.models import CheckpointState

Row = Mapping[str, Any]

NOTHING_KEEPS: Final = "no rule keeps it; the next prune deletes it"


@dataclass(frozen=True)
class _Candidate:
    """A row as the keep rules look at it."""

    name: str
    step: int
    committed_at: float
    metrics: Mapping[str, float]


def explain(
    checkpoints: Sequence[Row],
    uses: Mapping[str, Sequence[str]],
    keep: Keep,
    *,
    branch: Sequence[Row] | None = None,
    now: float | None = None,
) -> list[str]:
    """A reason for each checkpoint of one run, which are given oldest first.

    `branch` has what may be resumed from, oldest first, when `checkpoints` are not the whole run;
    the newest is enough where no rule limits what is kept. `uses` says by directory's name what
    else still needs it, such as `parent of run b`. `now` is Unix seconds, the clock's unless given.
    """
    on_branch = [
        _Candidate(row["name"], row["step"], row["committed_at"] or 0.0, row["metrics"] or {})
        for row in (checkpoints if branch is None else branch)
        if row["state"] == CheckpointState.COMMITTED and not row["rolled_back"]
    ]
    ruled = kept_by_rules(on_branch, keep, now=time.time() if now is None else now)
    newest = on_branch[-1].name if on_branch else None
    return [
        _explain(row, row["name"] == newest, uses.get(row["name"], ()), ruled, keep)
        for row in checkpoints
    ]


def _explain(
    row: Row,
    is_newest: bool,
    uses: Sequence[str],
    ruled: Mapping[str, Sequence[str]],
    keep: Keep,
) -> str:
    if row["state"] == CheckpointState.DELETED:
        return f"deleted: {row['deleted_reason'] or 'no reason was recorded'}"
    said = []
    if row["state"] == CheckpointState.DAMAGED:
        said.append(f"damaged: {row['detail']}")
    if row["rolled_back"]:
        said.append("rolled back")
    if is_newest:
        said.append("newest")
    if row["pinned"]:
        said.append("pinned")
    said.extend(uses)
    rules = ruled.get(row["name"], () if keep.is_limited else ("all",))
    if rules:
        said.append(f"kept by rule: {', '.join(rules)}")
    return ", ".join(said) or NOTHING_KEEPS
