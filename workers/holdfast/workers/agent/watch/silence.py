"""Judge whether silent ranks hang, purely from what the nodes' agents observed.

A suspicion comes early and only costs taking stacks. Ending the ranks requires much more: every
rank is silent for longer than its phase allows, and for half of that no sample shows a sign of life
of any rank. So slow ranks continue. A rank that computes, reads or writes shows other functions in
its stack, other local variables and CPU time, or more bytes in the next sample. A changed variable
alone is none: a wait with a time limit has a deadline. A wait for a disk is detected.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from holdfast.workers.agent.watch.stack_text import RankStack
from holdfast.workers.nodes.calibration import PhaseTimes

SUSPECT_MULTIPLE: Final = 2.0
SUSPECT_MARGIN_S: Final = 2.0
# Ten times slower than usual is only slow, whatever the stacks say.
END_MULTIPLE: Final = 12.0
# Training that continued after such a silence before may do so again, up to this limit.
RECURRING_S_MAX: Final = 300.0
# For this share of the allowed silence, no sample may show a sign of life.
STILL_SHARE: Final = 0.5
# If a rank died and its torchrun has not noticed, the other ranks are ended after this long.
DEAD_PEER_S: Final = 10.0
BUSY_CPU_SHARE: Final = 0.5
# A rank that computes with an unchanged stack may be in one long call, so it gets more time.
BUSY_FACTOR: Final = 3.0
# Weak signs of activity count for this long: storage that does not answer, processes below a rank
# that compute or read, and a rank whose stacks could not be read.
FAINT_SIGNS_S: Final = 1800.0
PROGRESS_BYTES: Final = 1 << 18
# A main thread that uses at least this share of a CPU computes. One that wakes to check a queue
# uses a thousandth.
COMPUTES_SHARE: Final = 0.05
STEPS_ENOUGH: Final = 5


@dataclass(frozen=True)
class PhaseLimits:
    """How long a phase may be silent before a rank in it may be ended.

    The limit is `default_s` while the phase's times are unknown. After that it is `END_MULTIPLE`
    times the phase's p99, but at least `floor_s`.
    """

    floor_s: float
    default_s: float


# Training times are known best. Other phases also depend on caches, data and storage.
LIMITS: Final[dict[str, PhaseLimits]] = {
    "start": PhaseLimits(600.0, 1800.0),
    "rendezvous": PhaseLimits(600.0, 1800.0),
    "load": PhaseLimits(600.0, 1800.0),
    "compile": PhaseLimits(600.0, 1800.0),
    "train": PhaseLimits(30.0, 600.0),
    "eval": PhaseLimits(120.0, 1800.0),
    "save": PhaseLimits(300.0, 1800.0),
    "stop": PhaseLimits(120.0, 600.0),
    "done": PhaseLimits(600.0, 3600.0),
}
# In these phases a rank works alone for long, and computing is a sign of life.
_ALONE: Final = frozenset({"start", "load", "compile", "eval", "save", "done"})
_LEFT: Final = frozenset({"stop", "done"})


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank at one moment, as its node's agent saw it. `pid` is 0 before it registers.

    `silent_s` is the time since its last sign of life. `own_s` is the part of a step in which it
    does not wait for others. `times` are the known times of its phase. `is_unreaped` means that it
    died and its torchrun has not noticed. Seconds and bytes count from its start.
    """

    rank: int
    pid: int
    step: int
    phase: str
    silent_s: float
    is_alive: bool = True
    is_unreaped: bool = False
    step_s: float = 0.0
    own_s: float = 0.0
    cpu_s: float = 0.0
    io_bytes: int = 0
    times: PhaseTimes | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "times": self.times.model_dump() if self.times else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankStatus:
        times = data["times"]
        return cls(**{**data, "times": _times_of(tuple(times.items())) if times else None})


@functools.lru_cache(maxsize=8192)
def _times_of(items: tuple[tuple[str, Any], ...]) -> PhaseTimes:
    """Return the times with these fields. The ranks of a node have the same, so they are shared."""
    return PhaseTimes(**dict(items))


@dataclass(frozen=True)
class SilenceLimits:
    """The two limits of each phase, with the overrides of the spec's `supervision.silence_s`."""

    overrides: Mapping[Any, float]

    def suspect_s(self, phase: str, times: PhaseTimes | None) -> float:
        """Return the seconds of silence after which stacks are taken."""
        end_s = self.end_s(phase, times)
        if not _is_calibrated(phase, times):
            return end_s / 2
        assert times is not None
        return min(end_s, SUSPECT_MULTIPLE * times.p99_s + SUSPECT_MARGIN_S)

    def end_s(self, phase: str, times: PhaseTimes | None) -> float:
        """Return the seconds of silence before which a rank is never ended."""
        limits = LIMITS[phase]
        usual_s = limits.floor_s if _is_calibrated(phase, times) else limits.default_s
        floor_s = self.overrides.get(phase, usual_s)
        if times is None:
            return floor_s
        recurring_s = min(RECURRING_S_MAX, END_MULTIPLE * times.recurring_s)
        return max(floor_s, END_MULTIPLE * times.p99_s, recurring_s)


def _is_calibrated(phase: str, times: PhaseTimes | None) -> bool:
    return times is not None and (phase != "train" or times.count >= STEPS_ENOUGH)


def have_registered(statuses: Sequence[RankStatus]) -> bool:
    """Return True once a rank has registered.

    Before that, the ranks may still import their program, or the program has no session. Then they
    can be suspected, and are never ended.
    """
    return any(status.pid for status in statuses)


def have_left(statuses: Sequence[RankStatus]) -> bool:
    """Return True if a rank has stopped or finished."""
    return any(status.phase in _LEFT for status in statuses)


def suspects(statuses: Sequence[RankStatus], limits: SilenceLimits) -> list[RankStatus]:
    """Return the ranks that are silent for longer than usual, once a rank has registered."""
    return silent_ranks(statuses, limits) if have_registered(statuses) else []


def silent_ranks(statuses: Sequence[RankStatus], limits: SilenceLimits) -> list[RankStatus]:
    """Return the ranks that are silent for longer than usual, even if none has registered."""
    # The ranks of a node share their times, so each limit is computed once per node.
    found, limits_s = [], dict[tuple[str, int], float]()
    for status in statuses:
        key = (status.phase, id(status.times))
        if key not in limits_s:
            limits_s[key] = limits.suspect_s(status.phase, status.times)
        if status.silent_s >= limits_s[key]:
            found.append(status)
    return found


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All ranks at one moment, with their stacks by rank. `at` is monotonic seconds."""

    at: float
    statuses: Sequence[RankStatus]
    stacks: Mapping[int, RankStack]


def left_to_wait_s(
    statuses: Sequence[RankStatus],
    limits: SilenceLimits,
    still_s: float,
    busy: frozenset[int] = frozenset(),
) -> float:
    """Return the seconds until all ranks may be ended if they stay silent; 0 if they may be now.

    No sample has shown a sign of life of any rank for `still_s`. The `busy` ranks computed since
    the last sample. A rank known to be dead shortens the wait.
    """
    if dead_peers(statuses):
        return max(0.0, DEAD_PEER_S - still_s)
    left = [0.0]
    for status in statuses:
        limit_s = limits.end_s(status.phase, status.times)
        limit_s *= BUSY_FACTOR if status.rank in busy else 1.0
        left += [limit_s - status.silent_s, STILL_SHARE * limit_s - still_s]
    return max(left)


def dead_peers(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return ranks that died at least `DEAD_PEER_S` ago and whose torchrun has not noticed.

    A rank that exited and was noticed ended without an error, so its peers may be busy for long.
    """
    return [
        status
        for status in statuses
        if status.is_unreaped and status.phase not in _LEFT and status.silent_s >= DEAD_PEER_S
    ]


def busy_ranks(before: Sample, after: Sample) -> frozenset[int]:
    """Return the ranks that computed between two samples, in phases where that counts."""
    former = {status.rank: status for status in before.statuses}
    enough_s = BUSY_CPU_SHARE * (after.at - before.at)
    return frozenset(
        status.rank
        for status in after.statuses
        if status.phase in _ALONE
        and status.rank in former
        and status.cpu_s - former[status.rank].cpu_s >= enough_s
    )


def signs_of_life(before: Sample, after: Sample) -> list[int]:
    """Return the ranks that showed a sign of life in `after` or since `before`."""
    former = {status.rank: status for status in before.statuses}
    return [
        status.rank
        for status in after.statuses
        if _made_progress(former.get(status.rank), status, before, after)
        or (status.silent_s < FAINT_SIGNS_S and _may_be_working(status, before, after))
    ]


def _made_progress(
    was: RankStatus | None, status: RankStatus, before: Sample, after: Sample
) -> bool:
    """Return True if something changed that changes with the rank's work."""
    return (
        was is None
        or (was.pid, was.phase, was.step) != (status.pid, status.phase, status.step)
        or status.io_bytes - was.io_bytes >= PROGRESS_BYTES
        or _works(before.stacks.get(status.rank), after.stacks.get(status.rank), after, before)
    )


def _works(was: RankStack | None, stack: RankStack | None, after: Sample, before: Sample) -> bool:
    """Return True if the stacks show work: other functions, or computing in other variables."""
    if was is None or stack is None or not _are_comparable(was, stack):
        return False
    computes = stack.computed_s - was.computed_s >= COMPUTES_SHARE * (after.at - before.at)
    if stack.functions and not computes:
        return was.functions != stack.functions
    return was.digest != stack.digest


def _are_comparable(was: RankStack, stack: RankStack) -> bool:
    """Return True if both stacks could be read, and in the same way."""
    return bool(was.digest and stack.digest) and was.source == stack.source


def _may_be_working(status: RankStatus, before: Sample, after: Sample) -> bool:
    """Return True for a weak sign of life: the rank may be at work."""
    stack = after.stacks.get(status.rank)
    was = before.stacks.get(status.rank)
    if was is None or stack is None or not _are_comparable(was, stack):
        return status.pid > 0 and status.is_alive
    if status.pid and status.phase in _ALONE and was.digest != stack.digest:
        return True
    computed_s = stack.helpers_cpu_s - was.helpers_cpu_s
    moved_bytes = stack.helpers_io_bytes - was.helpers_io_bytes
    return (
        stack.on_storage
        or computed_s >= BUSY_CPU_SHARE * (after.at - before.at)
        or moved_bytes >= PROGRESS_BYTES
    )
