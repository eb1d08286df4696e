"""`holdfast checkpoints --best METRIC`: a run's checkpoints by a logged metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from holdfast.contracts.errors import NotFoundError

if TYPE_CHECKING:
    from holdfast.lineage.queries.views import CheckpointView


class Mode(StrEnum):
    """Which values of a metric are better."""

    MIN = "min"
    MAX = "max"


def best_first(
    found: Sequence[CheckpointView], metric: str, mode: Mode | None, spec: Mapping[str, Any]
) -> list[CheckpointView]:
    """Return the committed checkpoints with a metric, the best first.

    Without `mode`, that of the spec's `checkpoint.keep.best` counts, if it is for this metric.
    Raises `NotFoundError` if no checkpoint has the metric, with the names of those there are.
    """
    rule = ((spec.get("checkpoint") or {}).get("keep") or {}).get("best") or {}
    given = rule.get("mode") if rule.get("metric") == metric else None
    branch = [one for one in found if one["state"] == "committed" and not one["rolled_back"]]
    rows = [(value, one) for one in branch if _is_number(value := one["metrics"].get(metric))]
    if not rows:
        known = sorted({name for one in branch for name in one["metrics"]})
        raise NotFoundError(
            f"no committed checkpoint has a finite metric {metric!r}; logged metrics: "
            f"{', '.join(known) or 'none'}"
        )
    rows.sort(key=lambda row: row[0], reverse=(mode or given) == Mode.MAX)
    return [one for _, one in rows]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
