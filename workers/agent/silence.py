"""Whether silent ranks hang: a pure judgement of what the nodes' agents saw.

Suspicion comes early and costs a look at the stacks. An end needs much more: every rank silent
for longer than its phase may be, and no sign of life of any of them for half of that, sample after
sample. So what is slow goes on: a rank that computes, reads or writes shows another stack, other
local variables or more bytes the next time; one that waits for a disk is seen to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from holdfast.workers.agent.calibration import PhaseTimes
from holdfast.workers.agent.stack_text import RankStack

SUSPECT_MULTIPLE: Final = 2.0
SUSPECT_MARGIN_S: Final = 2.0
# Ten times slower is slow and no more, whatever the stacks say.
END_MULTIPLE: Final = 12.0
# Training that was as silent before, and went on, may be so again; up to here.
RECURRING_S_MAX: Final = 300.0
# No sample may have shown a sign of life for this share of the silence that is allowed.
STILL_SHARE: Final = 0.5
# A rank that died, while its torchrun does not take note, takes the others' hope after this long.
DEAD_PEER_S: Final = 10.0
BUSY_CPU_SHARE: Final = 0.5
# A rank that computes with an unchanged stack may be in one long call: it gets this much more.
BUSY_FACTOR: Final = 3.0
# So long do signs count that something goes on, but not what: storage that does not answer,
# processes below a rank that compute or read, a rank whose stacks nobody could read.
FAINT_SIGNS_S: Final = 1800.0
PROGRESS_BYTES: Final = 1 << 18
STEPS_ENOUGH: Final = 5


@dataclass(frozen=True)
class Limits:
    """How long a phase may be silent before a rank in it may be ended.

    `default_s` while nothing is known of the phase; then `END_MULTIPLE` times its p99, `floor_s`
    at least.
    """

    floor_s: float
    default_s: float


# Training is what is known best. What the other phases take hangs on caches, data and storage too.
LIMITS: Final[dict[str, Limits]] = {
    "start": Limits(600.0, 1800.0),
    "rendezvous": Limits(600.0, 1800.0),
    "load": Limits(600.0, 1800.0),
    "compile": Limits(600.0, 1800.0),
    "train": Limits(30.0, 600.0),
    "eval": Limits(120.0, 1800.0),
    "save": Limits(300.0, 1800.0),
    "stop": Limits(120.0, 600.0),
    "done": Limits(600.0, 3600.0),
}
# In these a rank works by itself for long, and computing is a sign of life.
_ALONE: Final = frozenset({"start", "load", "compile", "eval", "save", "done"})
_LEFT: Final = frozenset({"stop", "done"})


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank at one moment, as its node's agent saw it. `pid` is 0 before it spoke.

    `silent_s` counts from its last word, `own_s` is what a step takes it without waiting for
    others; `times` is what is known of its phase. `is_unreaped`: it died, and its torchrun has not
    noticed. All in seconds and bytes since its start.
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
        return cls(**{**data, "times": PhaseTimes(**times) if times else None})


@dataclass(frozen=True)
class SilenceLimits:
    """The two limits of each phase, with what a spec's `supervision.silence_s` says instead."""

    overrides: Mapping[Any, float]

    def suspect_s(self, phase: str, times: PhaseTimes | None) -> float:
        """Seconds of silence after which stacks are looked at."""
        end_s = self.end_s(phase, times)
        if not _is_calibrated(phase, times):
            return end_s / 2
        assert times is not None
        return min(end_s, SUSPECT_MULTIPLE * times.p99_s + SUSPECT_MARGIN_S)

    def end_s(self, phase: str, times: PhaseTimes | None) -> float:
        """Seconds of silence before which a rank is never ended."""
        limits = LIMITS[phase]
        usual_s = limits.floor_s if _is_calibrated(phase, times) else limits.default_s
        floor_s = self.overrides.get(phase, usual_s)
        if times is None:
            return floor_s
        recurring_s = min(RECURRING_S_MAX, END_MULTIPLE * times.recurring_s)
        return max(floor_s, END_MULTIPLE * times.p99_s, recurring_s)


def _is_calibrated(phase: str, times: PhaseTimes | None) -> bool:
    return times is not None and (phase != "train" or times.count >= STEPS_ENOUGH)


def watched(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """The ranks whose silence means something: none while no rank has ever spoken.

    A program without a session never does, and is nobody's to judge.
    """
    return list(statuses) if any(look.pid for look in statuses) else []


def suspects(statuses: Sequence[RankStatus], limits: SilenceLimits) -> list[RankStatus]:
    """The ranks that are silent for longer than they were before."""
    return [
        look
        for look in watched(statuses)
        if look.silent_s >= limits.suspect_s(look.phase, look.times)
    ]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All ranks at one moment, with their stacks by rank. `at` is monotonic seconds."""

    at: float
    statuses: Sequence[RankStatus]
    stacks: Mapping[int, RankStack]

    def digest(self, rank: int) -> str:
        """What of a rank changes while it works; empty where its stacks could not be had."""
        stack = self.stacks.get(rank)
        return stack.digest if stack else ""


def left_to_wait_s(
    statuses: Sequence[RankStatus],
    limits: SilenceLimits,
    still_s: float,
    busy: frozenset[int] = frozenset(),
) -> float:
    """Seconds until all ranks may be ended, if nothing stirs until then; 0 when they may be now.

    For `still_s` no sample has shown a sign of life of any rank; `busy` ones computed since the
    last. A rank known to be dead ends the wait for it.
    """
    seen = watched(statuses)
    if dead_peers(seen):
        return max(0.0, DEAD_PEER_S - still_s)
    left = [0.0]
    for look in seen:
        limit_s = limits.end_s(look.phase, look.times)
        limit_s *= BUSY_FACTOR if look.rank in busy else 1.0
        left += [limit_s - look.silent_s, STILL_SHARE * limit_s - still_s]
    return max(left)


def dead_peers(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Ranks that died `DEAD_PEER_S` ago or longer, and their torchrun has not noticed.

    One that is gone, and was noticed, ended without an error: its peers may be busy for long.
    """
    return [
        look
        for look in statuses
        if look.is_unreaped and look.phase not in _LEFT and look.silent_s >= DEAD_PEER_S
    ]


def busy_ranks(before: Sample, after: Sample) -> frozenset[int]:
    """Ranks that computed between two samples, in a phase where that is a sign of life."""
    former = {look.rank: look for look in before.statuses}
    enough_s = BUSY_CPU_SHARE * (after.at - before.at)
    return frozenset(
        look.rank
        for look in after.statuses
        if look.phase in _ALONE
        and look.rank in former
        and look.cpu_s - former[look.rank].cpu_s >= enough_s
    )


def signs_of_life(before: Sample, after: Sample) -> list[int]:
    """Ranks that showed one in `after` or since `before`."""
    former = {look.rank: look for look in before.statuses}
    return [
        look.rank
        for look in watched(after.statuses)
        if _moved(former.get(look.rank), look, before, after)
        or (look.silent_s < FAINT_SIGNS_S and _stirs(look, before, after))
    ]


def _moved(was: RankStatus | None, look: RankStatus, before: Sample, after: Sample) -> bool:
    """True when something of the rank changed that changes with its work."""
    return (
        was is None
        or (was.pid, was.phase, was.step) != (look.pid, look.phase, look.step)
        or look.io_bytes - was.io_bytes >= PROGRESS_BYTES
        or before.digest(look.rank) != after.digest(look.rank)
    )


def _stirs(look: RankStatus, before: Sample, after: Sample) -> bool:
    """True when the rank may be at work for all that is known: a faint sign."""
    stack = after.stacks.get(look.rank)
    if stack is None or not stack.digest:
        return look.pid > 0 and look.is_alive
    was = before.stacks.get(look.rank) or RankStack(rank=look.rank)
    computed_s = stack.helpers_cpu_s - was.helpers_cpu_s
    moved_bytes = stack.helpers_io_bytes - was.helpers_io_bytes
    return (
        stack.on_storage
        or computed_s >= BUSY_CPU_SHARE * (after.at - before.at)
        or moved_bytes >= PROGRESS_BYTES
    )
