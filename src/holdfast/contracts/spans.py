"""The attempts and launches of a run as periods, from which `goodput` computes its account."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of torchrun. Times are Unix seconds; None means unknown.

    Ranks restore their state from `loads_from` to `trained_from`. They train until `hangs_from` or
    `trained_until`. `held` are the periods in which saves blocked training.
    """

    started_at: float | None = None
    loads_from: float | None = None
    trained_from: float | None = None
    hangs_from: float | None = None
    trained_until: float | None = None
    ended_at: float | None = None
    resumed_step: int | None = None
    last_step: int | None = None
    held: tuple[tuple[float, float], ...] = ()


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
