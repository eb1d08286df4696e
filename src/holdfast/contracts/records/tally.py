"""What the frequent lines of a run's journals add up to.

A run that saves every few minutes writes hundreds of thousands of lines a year. A supervisor reads
each of them once, adds it to a tally, and forgets it. So its memory does not grow with the run's
age. It keeps the lines of the other kinds, from which decisions are made: a few per attempt.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.contracts.disk.bounds import TIME_MAX
from holdfast.contracts.disk.journal import Event, EventKind

# The attempts and launches of a run as periods, from which `goodput` computes its account.


@dataclass(frozen=True, slots=True)
class Blocked:
    """The saves of one launch that blocked training: `count` periods of `seconds` together."""

    began_at: float
    ended_at: float
    seconds: float
    count: int = 1

    def plus(self, other: Blocked) -> Blocked:
        """Return both together. Where they overlap, `other` counts only from the end of this."""
        # Counted once, because lines of several journals may describe the same period.
        if other.began_at < self.began_at:
            return other.plus(self)
        length_s = other.ended_at - other.began_at
        new_s = max(0.0, other.ended_at - max(other.began_at, self.ended_at))
        share = new_s / length_s if length_s > 0 else 0.0
        return Blocked(
            self.began_at,
            max(self.ended_at, other.ended_at),
            self.seconds + share * other.seconds,
            self.count + other.count,
        )

    def within(self, low: float, high: float) -> float:
        """Return the seconds from `low` to `high`: all, or a share if not all periods are there."""
        length_s = self.ended_at - self.began_at
        inside_s = min(high, self.ended_at) - max(low, self.began_at)
        return self.seconds * min(1.0, max(0.0, inside_s / length_s)) if length_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class LaunchSpan:
    """One launch of torchrun. Times are Unix seconds; None means unknown.

    Ranks restore their state from `loads_from` to `trained_from`. They train until `hangs_from` or
    `trained_until`. Ranks that are silent now have hung since `silent_from`. `held` are the periods
    in which saves blocked training. `blocked` has the sum of further ones.
    """

    started_at: float | None = None
    loads_from: float | None = None
    trained_from: float | None = None
    hangs_from: float | None = None
    silent_from: float | None = None
    trained_until: float | None = None
    ended_at: float | None = None
    resumed_step: int | None = None
    last_step: int | None = None
    held: tuple[tuple[float, float], ...] = ()
    blocked: Blocked | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """One attempt, and the GPUs that it held. Times are Unix seconds.

    `place` is where it ran, see `Resources.at`, and `gpu_hour` the price of a GPU hour there; None
    for the run's own.
    """

    gpus: int
    place: int = 0
    gpu_hour: float | None = None
    is_preempted: bool = False
    submitted_at: float | None = None
    started_at: float | None = None
    stop_requested_at: float | None = None
    ended_at: float | None = None
    resumed_step: int | None = None
    last_step: int | None = None
    launches: tuple[LaunchSpan, ...] = ()


# Lines of these kinds, and of kinds that only a newer version knows, are counted and not kept.
COUNTED: Final = frozenset(
    {
        *(EventKind.STAGED, EventKind.COMMITTED, EventKind.SAVE_FAILED),
        *(EventKind.MIRRORED, EventKind.MIRROR_FAILED, EventKind.FETCHED, EventKind.TRACKED),
        *(EventKind.GOODPUT, EventKind.STRAGGLER),
        *(EventKind.NODE_SILENT, EventKind.NODE_SLOW, EventKind.NODE_UNHEALTHY),
        *(EventKind.LINK_SLOW, EventKind.SLOWDOWN_TESTED, EventKind.PROTECTION),
        *(EventKind.ATTEMPT_RESERVED, EventKind.ATTEMPT_SUBMITTED, EventKind.CLAIMED),
        *(EventKind.NOTICE, EventKind.STOP_FAILED, EventKind.AUDIT, EventKind.NOTE),
        EventKind.ALERT_ACKNOWLEDGED,
    }
)
# The kinds of which a tally knows for which attempts there is a line.
LISTED: Final = frozenset(
    {EventKind.ATTEMPT_RESERVED, EventKind.ATTEMPT_SUBMITTED, EventKind.GOODPUT}
)
# Only the newest line about the same subject is kept. The subject is in these facts.
_REPLACED: Final[Mapping[str, tuple[str, ...]]] = {
    EventKind.SUPERVISED: (),
    EventKind.DECISION: ("after_attempt",),
    EventKind.ATTEMPT_STATE: ("attempt", "state"),
    EventKind.HANG_SUSPECTED: ("attempt", "launch"),
    EventKind.HANG_CLEARED: ("attempt", "launch"),
    EventKind.LIMIT_PASSED: ("limit",),
    EventKind.METRIC_MISSING: ("key", "metric"),
    EventKind.METRIC: ("checkpoint", "metric"),
    EventKind.CONSUMER: ("consumer", "checkpoint"),
    EventKind.SIGNAL: ("attempt", "cause"),
    EventKind.ORDER_STATE: ("order",),
    EventKind.VERIFIED: ("checkpoint",),
}
# The last save of a launch. Training does not continue after it.
FINAL: Final = "final"
RECENT_MAX: Final = 20
DELETIONS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Commits:
    """The committed checkpoints of one attempt: the newest step, and the time of the newest line.

    `branch_step` is the newest step without those that a rollback removed from the run's branch,
    and `branch_name` its checkpoint's directory name.
    """

    newest_step: int | None = None
    newest_at: float = 0.0
    branch_step: int | None = None
    branch_name: str = ""

    def plus(self, other: Commits) -> Commits:
        """Return both together."""
        branch = max(self, other, key=lambda one: _or_below(one.branch_step))
        return Commits(
            max(self.newest_step, other.newest_step, key=_or_below),
            max(self.newest_at, other.newest_at),
            branch.branch_step,
            branch.branch_name,
        )


@dataclass(frozen=True, order=True)
class Commit:
    """A recent commit: its time, and the attempt that wrote the checkpoint with this name."""

    at: float
    checkpoint: str
    attempt: int | None = field(compare=False)


@dataclass(kw_only=True, slots=True)
class Tally:
    """The sums over all lines of some journals.

    `commits` is by attempt, `blocked` by attempt and launch. `listed` has the kind and the attempt
    of each line of the kinds in `LISTED`. `excluded` are the checkpoints that did not count for the
    branch.
    """

    lines: int = 0
    committed: int = 0
    newest_at: float = 0.0
    commits: dict[int | None, Commits] = field(default_factory=dict)
    blocked: dict[tuple[int, int], Blocked] = field(default_factory=dict)
    listed: set[tuple[str, int | None]] = field(default_factory=set)
    recent: tuple[Commit, ...] = ()
    unknown_kinds: set[str] = field(default_factory=set)
    excluded: frozenset[str] = frozenset()

    def add(self, event: Event) -> bool:
        """Add one line; return whether it must be kept too."""
        self.lines += 1
        if event.time <= TIME_MAX:
            self.newest_at = max(self.newest_at, event.time)
        kind = event.kind
        if kind is EventKind.STAGED:
            return self._add_staged(event)
        if kind is EventKind.COMMITTED:
            self._add_commit(event)
        elif kind in LISTED:
            self.listed.add((str(kind), event.data.get("attempt")))
        # A program of another version counts them, so an upgrade reads the run again, see
        # decision 41.
        elif not isinstance(kind, EventKind):
            self.unknown_kinds.add(kind)
            return False
        return kind not in COUNTED

    def _add_commit(self, event: Event) -> None:
        facts = event.data
        number, step, name = facts.get("attempt"), facts.get("step"), facts.get("checkpoint")
        self.committed += 1
        is_on_branch = name not in self.excluded
        found = Commits(
            step, event.time, step if is_on_branch else None, name or "" if is_on_branch else ""
        )
        former = self.commits.get(number)
        self.commits[number] = found if former is None else former.plus(found)
        if name:
            self.recent = (*self.recent[1 - RECENT_MAX :], Commit(event.time, name, number))

    def _add_staged(self, event: Event) -> bool:
        """Add a save; return True for one that `Blocked` cannot hold."""
        number, launch = event.data.get("attempt"), event.data.get("launch")
        # Training does not continue after the last save, so its time is not added to the others.
        if number is None or launch is None or event.data.get("reason") == FINAL:
            return True
        length_s = seconds_in(event.data.get("blocked_s"))
        found = Blocked(event.time - length_s, event.time, length_s, int(length_s > 0))
        former = self.blocked.get((number, launch))
        self.blocked[number, launch] = found if former is None else former.plus(found)
        return False

    @property
    def newest_step(self) -> int | None:
        """The newest committed step; None if there is none."""
        steps = [one.newest_step for one in self.commits.values() if one.newest_step is not None]
        return max(steps, default=None)

    def has_counted(self, excluded: frozenset[str]) -> bool:
        """Return True if the newest checkpoint of some attempt is one of `excluded`."""
        return any(one.branch_name in excluded for one in self.commits.values() if one.branch_name)


def total(parts: Iterable[Tally]) -> Tally:
    """Return the sums of all parts, as a new tally."""
    found = Tally()
    recent: list[Commit] = []
    for part in parts:
        found.lines += part.lines
        found.committed += part.committed
        found.newest_at = max(found.newest_at, part.newest_at)
        _merge(found.commits, part.commits)
        _merge(found.blocked, part.blocked)
        found.listed |= part.listed
        found.unknown_kinds |= part.unknown_kinds
        found.excluded = part.excluded
        recent += part.recent
    found.recent = tuple(sorted(heapq.nlargest(RECENT_MAX, recent)))
    return found


def tally_of(events: Iterable[Event], excluded: frozenset[str]) -> Tally:
    """Return the tally of all lines of a run."""
    found = Tally(excluded=excluded)
    for event in events:
        found.add(event)
    return found


def subject_of(event: Event) -> Hashable:
    """Return a value that lines have in common of which only the newest matters."""
    if event.kind is EventKind.CHECKPOINT_DELETED:
        # The newest ones are kept, because a checkpoint is deleted after its line was written.
        return event.kind, event.writer, event.sequence % DELETIONS_MAX
    names = _REPLACED.get(event.kind)
    if names is None:
        return event.writer, event.opening, event.sequence, event.time
    return event.kind, *(event.data.get(name) for name in names)


def _merge(into: dict[Any, Any], other: Mapping[Any, Any]) -> None:
    """Add the values of `other`. Nearly all keys of an attempt come from one journal."""
    if not into:
        into.update(other)
        return
    for key in into.keys() & other.keys():
        into[key] = into[key].plus(other[key])
    for key in other.keys() - into.keys():
        into[key] = other[key]


def _or_below(step: int | None) -> float:
    return -2.0 if step is None else step


def seconds_in(value: object) -> float:
    """Return `value` as a duration or time; 0 if it is neither."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value < math.inf else 0.0
