"""Where the time of a run went, by table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lineage.goodput import Goodput, Launch, Span, account


def parts_of(found: Goodput) -> list[float]:
    """The durations that the total is cut into."""
    return [
        found["queued_s"],
        found["starting_s"],
        found["training_s"],
        found["lost_s"],
        found["blocked_s"],
        found["stopped_s"],
    ]


def span(**fields: Any) -> Span:
    return Span(**{"world_size": 4, **fields})


def test_one_quiet_attempt() -> None:
    launch = Launch(started_at=12, trained_from=20, ended_at=118, resumed_step=0, last_step=98)
    only = span(submitted_at=0, started_at=10, ended_at=120, last_step=98, launches=(launch,))
    found = account([only], created_at=0, until=120, blocked_s=8, gpu_hour=3.0, currency="EUR")
    assert found["queued_s"] == 10
    assert found["starting_s"] == 10
    assert found["training_s"] == 90
    assert found["blocked_s"] == 8
    assert found["stopped_s"] == 2
    assert found["ettr"] == 0.75
    assert found["steps_lost"] == 0
    assert found["gpu_hours"] == pytest.approx(4 * 110 / 3600)
    assert found["cost"] == pytest.approx(found["gpu_hours"] * 3.0)


def test_steps_trained_again_are_lost_and_so_is_their_time() -> None:
    first = span(
        submitted_at=0,
        started_at=0,
        ended_at=100,
        last_step=100,
        launches=(Launch(trained_from=0, ended_at=100, resumed_step=0),),
    )
    second = span(
        submitted_at=110,
        started_at=120,
        launches=(Launch(trained_from=125, resumed_step=70),),
    )
    found = account([first, second], created_at=0, until=225)
    assert found["steps_lost"] == 30
    assert found["lost_s"] == pytest.approx(30)
    assert found["training_s"] == pytest.approx(100 - 30 + 100)
    assert found["starting_s"] == 5
    assert found["queued_s"] == 10
    assert found["stopped_s"] == pytest.approx(10)
    assert found["cost"] is None


def steps_lost(*legs: tuple[int | None, int | None]) -> int:
    """The steps lost by one attempt whose launches resumed and reached these steps."""
    launches = tuple(Launch(trained_from=0, resumed_step=r, last_step=last) for r, last in legs)
    return account([span(started_at=0, launches=launches)], created_at=0, until=1)["steps_lost"]


@pytest.mark.parametrize(
    ("legs", "lost"),
    [
        (((0, 85), (50, 120)), 35),
        (((0, 85), (50, None), (50, 90)), 35),
        (((0, 85), (None, None), (50, 90)), 35),
        (((0, 85), (85, 90)), 0),
        (((0, 85), (90, 95)), 0),
        (((0, 85), (0, 95)), 85),
        (((0, 10), (5, 20), (15, 30)), 10),
        (((0, 10), (5, 7), (5, 30)), 7),
        ((), 0),
    ],
)
def test_steps_lost(legs: tuple[tuple[int | None, int | None], ...], lost: int) -> None:
    assert steps_lost(*legs) == lost


def test_attempts_without_launches_count_by_their_own_steps() -> None:
    first = span(started_at=0, ended_at=10, resumed_step=0, last_step=40)
    second = span(started_at=20, ended_at=30, resumed_step=25, last_step=50)
    found = account([first, second], created_at=0, until=30)
    assert found["steps_lost"] == 15
    assert found["lost_s"] + found["training_s"] == pytest.approx(20)
    assert found["stopped_s"] == pytest.approx(10)


def test_nothing_has_happened_yet() -> None:
    found = account([], created_at=5, until=5)
    assert found["total_s"] == 0
    assert found["ettr"] == 0
    waiting = account([span(submitted_at=5)], created_at=5, until=65)
    assert waiting["queued_s"] == 60
    assert waiting["gpu_hours"] == 0


times = st.none() | st.floats(min_value=0, max_value=1e6)
steps = st.none() | st.integers(min_value=0, max_value=1000)
launches = st.builds(
    Launch,
    started_at=times,
    trained_from=times,
    ended_at=times,
    resumed_step=steps,
    last_step=steps,
)
spans = st.builds(
    Span,
    world_size=st.integers(min_value=0, max_value=64),
    submitted_at=times,
    started_at=times,
    stop_requested_at=times,
    ended_at=times,
    resumed_step=steps,
    last_step=steps,
    launches=st.lists(launches, max_size=3).map(tuple),
)


@given(st.lists(spans, max_size=4), st.floats(min_value=0, max_value=1e6), times)
def test_no_part_is_negative_whatever_the_clocks_say(
    attempts: list[Span], until: float, blocked_s: float | None
) -> None:
    found = account(attempts, created_at=0, until=until, blocked_s=blocked_s or 0.0)
    parts = parts_of(found)
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(found["total_s"])
    assert 0 <= found["ettr"] <= 1 + 1e-9
    assert found["steps_lost"] >= 0


def test_parts_add_up_to_the_total() -> None:
    first = span(submitted_at=3, started_at=10, stop_requested_at=50, ended_at=60, last_step=9)
    found = account([first], created_at=0, until=80)
    assert sum(parts_of(found)) == found["total_s"] == 80
