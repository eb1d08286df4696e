"""The keep rules: which checkpoints of a branch a rule keeps, and its reason in words. Pure.

Each rule is one function from the branch, oldest first, to the names that it keeps. A rule that
was not given keeps nothing; when none was given, all is kept. Both retention, which deletes, and
lineage, which explains, ask here, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Final, Protocol

from holdfast.contracts.spec import Keep

HOUR_S: Final = 3600.0


class Candidate(Protocol):
    """What the rules look at in a checkpoint; a `Manifest` is one. Times are Unix seconds."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def committed_at(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


Rule = Callable[[Sequence[Candidate], Keep, float], dict[str, str]]


def kept_by_rules(
    branch: Sequence[Candidate], keep: Keep, *, now: float
) -> dict[str, tuple[str, ...]]:
    """The reasons for each checkpoint that a rule keeps, by name; `branch` is oldest step first.

    `branch` holds what may be resumed from: no rolled back and no damaged ones. `now` is Unix
    seconds.
    """
    if not keep.is_limited:
        return {one.name: ("all",) for one in branch}
    reasons: dict[str, tuple[str, ...]] = {}
    for rule in RULES:
        for name, reason in rule(branch, keep, now).items():
            reasons[name] = (*reasons.get(name, ()), reason)
    return reasons


def why_not_kept(one: Candidate, keep: Keep) -> str:
    """Why no rule keeps `one`, by naming every rule there is."""
    said = []
    if keep.last:
        said.append(f"not among the last {keep.last}")
    if keep.best:
        has_it = keep.best.metric in one.metrics
        said.append(
            f"not among the best {keep.best.n} by {keep.best.metric}"
            if has_it
            else f"without {keep.best.metric}"
        )
    if keep.every_steps:
        said.append(f"not the first of {_count(keep.every_steps, 'step')}")
    if keep.every_hours:
        said.append(f"not the first of {keep.every_hours:g} h")
    if keep.ttl:
        said.append(f"older than {keep.ttl}")
    return ", ".join(said)


def _last(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    if keep.last is None:
        return {}
    return {one.name: f"last {keep.last}" for one in branch[-keep.last :]}


def _best(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    """The best by the metric; of equals the older one, so that a tie deletes nothing."""
    if keep.best is None:
        return {}
    metric, n = keep.best.metric, keep.best.n
    sign = 1.0 if keep.best.mode == "min" else -1.0
    measured = [
        (value, one.name)
        for one in branch
        if (value := one.metrics.get(metric)) is not None and isfinite(value)
    ]
    measured.sort(key=lambda pair: sign * pair[0])
    return {
        name: f"best {place} of {n} by {metric} ({value:.4g})"
        for place, (value, name) in enumerate(measured[:n], 1)
    }


def _every_steps(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    """The first at or after each multiple: intervals by the clock rarely meet one exactly."""
    every = keep.every_steps
    if every is None:
        return {}
    reached = [one for one in branch if one.step >= every]
    words = f"every {_count(every, 'step')}"
    return dict.fromkeys(_firsts(reached, lambda one: one.step // every), words)


def _every_hours(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    """The first of each stretch of so many hours, counted from 1970 so that stretches stay."""
    if keep.every_hours is None:
        return {}
    stretch_s = keep.every_hours * HOUR_S
    words = f"every {keep.every_hours:g} h"
    return dict.fromkeys(_firsts(branch, lambda one: int(one.committed_at // stretch_s)), words)


def _ttl(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    if keep.ttl_s is None:
        return {}
    oldest = now - keep.ttl_s
    return {one.name: f"younger than {keep.ttl}" for one in branch if one.committed_at > oldest}


RULES: Final[tuple[Rule, ...]] = (_last, _best, _every_steps, _every_hours, _ttl)


def _firsts(branch: Sequence[Candidate], part_of: Callable[[Candidate], int]) -> list[str]:
    """The names of the first checkpoint in each part that `part_of` tells apart."""
    first: dict[int, str] = {}
    for one in branch:
        first.setdefault(part_of(one), one.name)
    return list(first.values())


def _count(number: int, thing: str) -> str:
    return thing if number == 1 else f"{number} {thing}s"
