"""The keep rules: which checkpoints of a branch are kept, with the reasons as text. Pure functions.

Each rule is a function from the branch, oldest first, to the names that it keeps. A rule that is
not set keeps nothing. If no rule is set, all checkpoints are kept. Retention, which deletes, and
lineage, which explains, both use this module, so their answers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Final, Protocol

from holdfast.contracts.spec.checkpoint import Keep

HOUR_S: Final = 3600.0


class Candidate(Protocol):
    """The facts of a checkpoint that the rules use, such as a `Manifest`. Times: Unix seconds."""

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
    """Return the reasons for each checkpoint that a rule keeps, by name.

    `branch` contains the checkpoints that a run can resume from, oldest step first, without rolled
    back and damaged ones. `now` is in Unix seconds.
    """
    if not keep.is_limited:
        return {one.name: ("all",) for one in branch}
    reasons: dict[str, tuple[str, ...]] = {}
    # Every rule is asked, although one reason is enough to keep: people see all reasons.
    for rule in RULES:
        for name, reason in rule(branch, keep, now).items():
            reasons[name] = (*reasons.get(name, ()), reason)
    return reasons


def why_not_kept(one: Candidate, keep: Keep) -> str:
    """Return why no rule keeps `one`, with a reason for each rule that is set."""
    reasons = []
    if keep.last:
        reasons.append(f"not among the last {keep.last}")
    if keep.best:
        has_metric = keep.best.metric in one.metrics
        reasons.append(
            f"not among the best {keep.best.n} by {keep.best.metric}"
            if has_metric
            else f"without {keep.best.metric}"
        )
    if keep.every_steps:
        reasons.append(f"not the first of {_count(keep.every_steps, 'step')}")
    if keep.doubling_steps:
        reasons.append(f"not the first of a doubling of {_count(keep.doubling_steps, 'step')}")
    if keep.every_hours:
        reasons.append(f"not the first of {keep.every_hours:g} h")
    if keep.ttl:
        reasons.append(f"older than {keep.ttl}")
    return ", ".join(reasons)


def _last(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    if keep.last is None:
        return {}
    return {one.name: f"last {keep.last}" for one in branch[-keep.last :]}


def _best(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    """Keep the best by the metric. With equal values, the older checkpoint ranks first.

    As long as no checkpoint has the metric, all are kept.
    """
    if keep.best is None:
        return {}
    metric, n = keep.best.metric, keep.best.n
    measured = ranked(branch, metric, keep.best.mode)
    if not measured:
        # The name may be misspelt, or the first evaluation is still to come. Any may be the best.
        return {one.name: f"no checkpoint has {metric} yet" for one in branch}
    return {
        name: f"best {place} of {n} by {metric} ({value:.4g})"
        for place, (value, name) in enumerate(measured[:n], 1)
    }


def ranked(branch: Sequence[Candidate], metric: str, mode: str) -> list[tuple[float, str]]:
    """Return (value, name) of the checkpoints with a finite value of a metric, the best first."""
    sign = 1.0 if mode == "min" else -1.0
    measured = [
        (value, one.name)
        for one in branch
        # NaN has no order. One such value would make the result of a sort arbitrary.
        # The index holds numbers that JSON does not have as text.
        if isinstance(value := one.metrics.get(metric), int | float) and isfinite(value)
    ]
    # The sort is stable and the branch begins with the oldest, so of equal values the older counts.
    return sorted(measured, key=lambda pair: sign * pair[0])


def _every_steps(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    """Keep the first at or after each multiple. Time intervals rarely hit a multiple exactly."""
    every = keep.every_steps
    if every is None:
        return {}
    # Multiple 0 does not count. It would keep the first checkpoint of every branch.
    reached = [one for one in branch if one.step >= every]
    reason = f"every {_count(every, 'step')}"
    return dict.fromkeys(_firsts(reached, lambda one: one.step // every), reason)


def _doubling_steps(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    """Keep the first at or after each doubling of the steps."""
    first = keep.doubling_steps
    if first is None:
        return {}
    reached = [one for one in branch if one.step >= first]
    reason = f"doubling of {_count(first, 'step')}"
    # Between two doublings, the quotient has the same number of bits.
    return dict.fromkeys(_firsts(reached, lambda one: (one.step // first).bit_length()), reason)


def _every_hours(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    """Keep the first of each period. Periods are counted from 1970, so that they do not move."""
    if keep.every_hours is None:
        return {}
    period_s = keep.every_hours * HOUR_S
    reason = f"every {keep.every_hours:g} h"
    return dict.fromkeys(_firsts(branch, lambda one: int(one.committed_at // period_s)), reason)


def _ttl(branch: Sequence[Candidate], keep: Keep, now: float) -> dict[str, str]:
    if keep.ttl_s is None:
        return {}
    # The time of the commit, not that of the file: a copy or a restore changes the latter.
    oldest = now - keep.ttl_s
    return {one.name: f"younger than {keep.ttl}" for one in branch if one.committed_at > oldest}


RULES: Final[tuple[Rule, ...]] = (_last, _best, _every_steps, _doubling_steps, _every_hours, _ttl)


def _firsts(branch: Sequence[Candidate], period_of: Callable[[Candidate], int]) -> list[str]:
    """Return the name of the first checkpoint in each period; `period_of` returns its number."""
    first: dict[int, str] = {}
    for one in branch:
        first.setdefault(period_of(one), one.name)
    return list(first.values())


def _count(number: int, unit: str) -> str:
    return unit if number == 1 else f"{number} {unit}s"
