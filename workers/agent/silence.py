"""Whether silent ranks hang: a pure judgement of what the nodes' agents saw.

Suspicion comes early and costs a look at the stacks. An end needs much more: every rank silent
for longer than its phase may be, and nothing of any of them changed between two samples. So what
is slow goes on: a rank that computes, reads or writes shows another stack, other local variables or
more bytes the next time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from holdfast.workers.agent.calibration import PhaseTimes

SUSPECT_MULTIPLE: Final = 2.0
SUSPECT_MARGIN_S: Final = 2.0
# A rank that is gone, while its torchrun does not say so, takes the others' hope after this long.
DEAD_PEER_S: Final = 10.0
BUSY_CPU_SHARE: Final = 0.5
# A rank that computes with an unchanged stack may be in one long call: it gets this much more.
BUSY_FACTOR: Final = 3.0
PROGRESS_BYTES: Final = 1 << 20
PROGRESS_CPU_S: Final = 0.5
STEPS_ENOUGH: Final = 5


@dataclass(frozen=True)
class Limits:
    """How long a phase may be silent before a rank in it may be ended.

    `default_s` while nothing is known of the phase; then `multiple` times its p99, `floor_s` at
    least.
    """

    floor_s: float
    default_s: float
    multiple: float


# Training is what ranks do together, and what is known best. The other phases vary by themselves:
# a tenfold one is slow and no more.
LIMITS: Final[dict[str, Limits]] = {
    "start": Limits(300.0, 1800.0, 12.0),
    "rendezvous": Limits(300.0, 1800.0, 12.0),
    "load": Limits(120.0, 1800.0, 12.0),
    "compile": Limits(300.0, 1800.0, 12.0),
    "train": Limits(30.0, 600.0, 5.0),
    "eval": Limits(60.0, 1800.0, 12.0),
    "save": Limits(60.0, 1800.0, 12.0),
    "stop": Limits(60.0, 600.0, 12.0),
    "done": Limits(600.0, 3600.0, 12.0),
}
# In these a rank works by itself for long, and computing is a sign of life.
_ALONE: Final = frozenset({"start", "load", "compile", "eval", "save", "done"})
_LEFT: Final = frozenset({"stop", "done"})


@dataclass(frozen=True, kw_only=True)
class RankLook:
    """A rank at one moment, as its node's agent saw it. `pid` is 0 before it spoke.

    `silent_s` counts from its last sign of life, `own_s` is what a step takes it without waiting
    for others; `times` is what is known of its phase. All in seconds and bytes since its start.
    """

    rank: int
    pid: int
    step: int
    phase: str
    silent_s: float
    is_alive: bool = True
    step_s: float = 0.0
    own_s: float = 0.0
    cpu_s: float = 0.0
    io_bytes: int = 0
    times: PhaseTimes | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "times": self.times.model_dump() if self.times else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankLook:
        times = data["times"]
        return cls(**{**data, "times": PhaseTimes(**times) if times else None})


@dataclass(frozen=True)
class Patience:
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
        limits, given_s = LIMITS[phase], self.overrides.get(phase)
        if not _is_calibrated(phase, times):
            return given_s if given_s is not None else limits.default_s
        assert times is not None
        floor_s = given_s if given_s is not None else limits.floor_s
        return max(floor_s, limits.multiple * times.p99_s)


def _is_calibrated(phase: str, times: PhaseTimes | None) -> bool:
    return times is not None and (phase != "train" or times.count >= STEPS_ENOUGH)


def watched(looks: Sequence[RankLook]) -> list[RankLook]:
    """The ranks whose silence means something: none while no rank has ever spoken.

    A program without a session never does, and is nobody's to judge.
    """
    return list(looks) if any(look.pid for look in looks) else []


def suspects(looks: Sequence[RankLook], patience: Patience) -> list[RankLook]:
    """The ranks that are silent for longer than they were before."""
    return [
        look
        for look in watched(looks)
        if look.silent_s >= patience.suspect_s(look.phase, look.times)
    ]


def left_to_wait_s(
    looks: Sequence[RankLook], patience: Patience, busy: frozenset[int] = frozenset()
) -> float:
    """Seconds until every rank has been silent for so long that all may be ended; 0 when it has.

    `busy` ranks computed since the last sample. A rank known to be dead ends the wait for it.
    """
    seen = watched(looks)
    if dead_peers(seen):
        return 0.0
    left = [
        patience.end_s(look.phase, look.times) * (BUSY_FACTOR if look.rank in busy else 1.0)
        - look.silent_s
        for look in seen
    ]
    return max([0.0, *left])


def dead_peers(looks: Sequence[RankLook]) -> list[RankLook]:
    """Ranks whose process is gone though they had not left, `DEAD_PEER_S` and longer."""
    return [
        look
        for look in looks
        if look.pid
        and not look.is_alive
        and look.phase not in _LEFT
        and look.silent_s >= DEAD_PEER_S
    ]


def busy_ranks(
    before: Sequence[RankLook], after: Sequence[RankLook], seconds: float
) -> frozenset[int]:
    """Ranks that computed between two samples, in a phase where that is a sign of life."""
    former = {look.rank: look for look in before}
    return frozenset(
        look.rank
        for look in after
        if look.phase in _ALONE
        and look.rank in former
        and look.cpu_s - former[look.rank].cpu_s >= BUSY_CPU_SHARE * seconds
    )


def moved(
    before: Sequence[RankLook],
    after: Sequence[RankLook],
    digests_before: Mapping[int, str],
    digests_after: Mapping[int, str],
) -> list[int]:
    """Ranks of which something changed between two samples, or that cannot be compared.

    A rank whose stacks could not be had has moved when it read, wrote or computed.
    """
    former = {look.rank: look for look in before}
    found = []
    for look in watched(after):
        was = former.get(look.rank)
        digest = digests_after.get(look.rank, "")
        if (
            was is None
            or (was.pid, was.phase, was.step) != (look.pid, look.phase, look.step)
            or look.io_bytes - was.io_bytes >= PROGRESS_BYTES
            or digests_before.get(look.rank, "") != digest
            or (not digest and look.cpu_s - was.cpu_s >= PROGRESS_CPU_S)
        ):
            found.append(look.rank)
    return found
