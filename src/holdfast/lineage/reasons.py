"""Why a checkpoint is still there, or why it is not. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.contracts.spec import Keep
from holdfast.lineage.models import CheckpointState

Row = Mapping[str, Any]


def explain(checkpoints: Sequence[Row], uses: Mapping[str, Sequence[str]], keep: Keep) -> list[str]:
    """A reason for each checkpoint of one run, which are given oldest first.

    `uses` says by directory's name what else still needs it, such as `parent of run b`.
    """
    on_branch = [
        row["name"]
        for row in checkpoints
        if row["state"] == CheckpointState.COMMITTED and not row["rolled_back"]
    ]
    return [_explain(row, on_branch, uses.get(row["name"], ()), keep) for row in checkpoints]


def _explain(row: Row, on_branch: Sequence[str], uses: Sequence[str], keep: Keep) -> str:
    if row["state"] == CheckpointState.DELETED:
        return f"deleted: {row['deleted_reason'] or 'no reason was recorded'}"
    said = []
    if row["state"] == CheckpointState.DAMAGED:
        said.append(f"damaged: {row['detail']}")
    if row["rolled_back"]:
        said.append("rolled back")
    if on_branch and row["name"] == on_branch[-1]:
        said.append("newest")
    if row["pinned"]:
        said.append("pinned")
    said.extend(uses)
    rule = _rule(row, on_branch, keep)
    if rule:
        said.append(rule)
    return ", ".join(said) or "no rule keeps it; the next prune deletes it"


def _rule(row: Row, on_branch: Sequence[str], keep: Keep) -> str:
    if keep.last is None:
        return "kept by rule: all"
    if row["name"] in on_branch[-keep.last :]:
        return f"kept by rule: last {keep.last}"
    if keep.every_steps and row["step"] % keep.every_steps == 0:
        return f"kept by rule: every {keep.every_steps} steps"
    return ""
