"""The attempts and launches of a run as periods, from which `goodput` computes its account."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocked:
    """The saves of one launch that blocked training: `count` periods of `seconds` together."""

    began_at: float
    ended_at: float
    seconds: float
    count: int = 1

    def plus(self, other: Blocked) -> Blocked:
        """Return both together. Where they overlap, `other` counts only from the end of this."""
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
class Launch:
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
    launches: tuple[Launch, ...] = ()
