"""How often to save and to take snapshots: the formula, its bounds, and the measured inputs."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.contracts.account.save_interval import (
    INTERVAL_MAX_S,
    INTERVAL_MIN_S,
    PRIOR_NODE_S,
    Failures,
    choose_interval,
    mean_failure_s,
)
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.errors import SpecError
from holdfast.trainer.pacing.cadence import Cadence, Interval
from holdfast.trainer.pacing.pace import StepMeter, observe_failures
from holdfast.trainer.staging.snapshots import EVERY_MAX, SnapshotRhythm, choose_every

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("seen", "cost_s", "flush_s", "interval_s", "bound"),
    [
        # Two failures in ten hours, half a second each: sqrt(2 * 18000 * 0.5).
        (Failures(2, 10 * HOUR_S), 0.5, 5.0, 134.16, "set by the formula"),
        (Failures(2, 10 * HOUR_S), 0.5, 400.0, 400.0, "raised to the time of a flush"),
        (Failures(50, HOUR_S), 1.0, 1.0, 33.33, "raised to keep the overhead within 3%"),
        (Failures(3600, HOUR_S), 0.001, 0.1, INTERVAL_MIN_S, "the minimum interval"),
        (Failures(0, 0.0), 10.0, 5.0, INTERVAL_MAX_S, "the maximum interval"),
        (Failures(0, 0.0), 10.0, 5000.0, 5000.0, "the maximum interval"),
    ],
)
def test_the_save_interval_follows_the_formula_within_its_bounds(
    seen: Failures, cost_s: float, flush_s: float, interval_s: float, bound: str
) -> None:
    choice = choose_interval(seen, 1, cost_s=cost_s, flush_s=flush_s)
    assert choice.interval_s == pytest.approx(interval_s, rel=1e-3)
    assert choice.bound == bound
    assert cost_s / choice.interval_s <= 0.03 + 1e-9
    assert choice.interval_s >= flush_s
    assert f"every {choice.interval_s:.0f} s" in str(choice)


@pytest.mark.parametrize(
    ("seen", "nodes", "expected"),
    [
        (Failures(0, 0.0), 1, PRIOR_NODE_S),
        (Failures(0, 0.0), 100, PRIOR_NODE_S / 100),
        (Failures(0, PRIOR_NODE_S), 100, PRIOR_NODE_S),
        (Failures(4, 8 * HOUR_S), 100, 2 * HOUR_S),
        (Failures(1, 0.0), 1, 1.0),
    ],
)
def test_the_mean_time_between_failures_is_measured_or_the_prior(
    seen: Failures, nodes: int, expected: float
) -> None:
    assert mean_failure_s(seen, nodes) == expected


def test_only_a_large_change_of_the_interval_counts_as_different() -> None:
    first = choose_interval(Failures(2, 10 * HOUR_S), 1, cost_s=0.5, flush_s=5.0)
    near = choose_interval(Failures(2, 10 * HOUR_S), 1, cost_s=0.6, flush_s=5.0)
    far = choose_interval(Failures(2, 10 * HOUR_S), 1, cost_s=1.5, flush_s=5.0)
    assert first.differs_from(None)
    assert not near.differs_from(first)
    assert far.differs_from(first)


@pytest.mark.parametrize(
    ("copy_us", "step_us", "every"),
    [
        (300, 10_000, 1),
        (301, 10_000, 2),
        (100_000, 10_000, 334),
        (100_000, 1, 0),
        (1, 0, 0),
        (0, 10_000, 1),
        (EVERY_MAX * 30, 1000, EVERY_MAX),
    ],
)
def test_snapshots_are_as_frequent_as_the_budget_allows(
    copy_us: int, step_us: int, every: int
) -> None:
    assert choose_every(copy_us, step_us) == every


def test_the_snapshot_rhythm_follows_the_option() -> None:
    fixed, none, auto = SnapshotRhythm("3"), SnapshotRhythm("off"), SnapshotRhythm("auto")
    assert [step for step in range(1, 10) if fixed.is_due(step)] == [3, 6, 9]
    assert not any(rhythm.is_due(step) for rhythm in (none, auto) for step in range(1, 10))
    assert not fixed.update(10, 10)
    assert not none.update(10, 10)
    assert auto.update(300, 5000)
    assert auto.every == 2
    assert not auto.update(299, 5000)
    for wrong in (0, "-1", "often"):
        with pytest.raises(SpecError, match=r"steps .* 'auto' or 'off'"):
            SnapshotRhythm(wrong)


def test_steps_during_a_flush_are_measured_separately() -> None:
    meter = StepMeter(100.0)
    assert (meter.step_s, meter.slowed_s) == (0.0, 0.0)
    meter.leave(101.0, is_flushing=False)
    meter.enter(105.0)
    meter.leave(106.0, is_flushing=False)
    assert meter.slowed_s == 0.0
    meter.leave(107.5, is_flushing=True)
    meter.leave(109.0, is_flushing=True)
    assert meter.step_s == pytest.approx(1.25)
    assert meter.slowed_s == pytest.approx(1.0)
    meter.restart()
    assert meter.step_s == 0.0


def test_early_decisions_come_at_growing_distances_and_miss_no_save() -> None:
    cadence = Cadence(Interval(steps=100), step=40, now=0.0, looks_early=True)
    meetings, saves = [], []
    for step in range(41, 401):
        if cadence.is_due(step):
            save, next_step = cadence.decide(step, float(step))
            cadence.update(step, next_step, saved=bool(save), now=float(step))
            meetings.append(step)
            saves += [step] if save else []
    assert meetings == [48, 64, 100, 200, 300, 400]
    assert saves == [100, 200, 300, 400]


def test_an_adopted_interval_is_followed() -> None:
    cadence = Cadence(Interval(seconds=600, is_auto=True), step=0, now=0.0)
    saves = []
    for step in range(1, 3000):
        if cadence.is_due(step):
            save, next_step = cadence.decide(step, step * 0.1)
            cadence.update(step, next_step, saved=bool(save), now=step * 0.1)
            saves += [step * 0.1] if save else []
            cadence.adopt(50.0)
    gaps = [b - a for a, b in zip([0.0, *saves], saves, strict=False)]
    assert gaps
    assert all(gap == pytest.approx(50.0, abs=3.0) for gap in gaps)


def event(kind: EventKind, time: float, **data: Any) -> Event:
    return Event(writer="w", opening=1, sequence=0, time=time, kind=kind, data=data)


def test_unannounced_failures_are_counted_from_the_journals() -> None:
    def span(attempt: int, launch: int, first: float, last: float) -> list[Event]:
        facts = {"attempt": attempt, "launch": launch}
        return [
            event(EventKind.RESUMED, first, **facts),
            event(EventKind.COMMITTED, last, **facts),
        ]

    def ended(attempt: int, launch: int, time: float, ending: str) -> Event:
        facts = {"attempt": attempt, "launch": launch, "ending": ending}
        return event(EventKind.LAUNCH_ENDED, time, **facts)

    events = [
        *span(1, 1, 0.0, 90.0),
        ended(1, 1, 100.0, "crashed"),
        *span(1, 2, 110.0, 150.0),
        ended(1, 2, 160.0, "stopped"),
        event(EventKind.ATTEMPT_ENDED, 161.0, attempt=1, cause="preemption"),
        # The node was lost, and with it the agent that would have journaled the end of the launch.
        *span(2, 1, 200.0, 250.0),
        event(EventKind.ATTEMPT_ENDED, 300.0, attempt=2, cause="node_failure"),
        *span(3, 1, 400.0, 430.0),
        event(EventKind.ATTEMPT_ENDED, 431.0, attempt=3, cause="time_limit"),
        # The current launch.
        *span(4, 1, 500.0, 600.0),
    ]
    assert observe_failures(events, (4, 1)) == Failures(2, 100.0 + 50.0 + 50.0 + 30.0)
    assert observe_failures([], (0, 1)) == Failures(0, 0.0)


def test_without_an_agent_a_note_marks_a_launch_that_left() -> None:
    left = {"attempt": 0, "launch": 1, "has_left": True, "text": "left after step 9"}
    events = [
        event(EventKind.RESUMED, 0.0, attempt=0, launch=1),
        event(EventKind.NOTE, 50.0, **left),
        event(EventKind.RESUMED, 60.0, attempt=0, launch=2),
        event(EventKind.STAGED, 80.0, attempt=0, launch=2),
        event(EventKind.RESUMED, 90.0, attempt=0, launch=3),
    ]
    assert observe_failures(events, (0, 3)) == Failures(1, 70.0)
