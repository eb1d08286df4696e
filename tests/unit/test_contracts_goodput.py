"""The goodput account: which part of a run each second belongs to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.contracts.account import goodput
from holdfast.contracts.account.goodput import PARTS, Prices, costs_of
from holdfast.contracts.account.timeline import KINDS, TimelineMark, launches_of
from holdfast.contracts.records.tally import LaunchSpan, Span
from holdfast.lineage.queries.totals import GoodputTotals, Money
from holdfast.lineage.queries.views import StretchView


def account(spans: list[Span], **fields: Any) -> dict[str, Any]:
    """The account as plain data, as users see it."""
    return asdict(goodput.account(spans, **fields))


def parts_of(found: dict[str, Any]) -> list[float]:
    """The durations that add up to the total."""
    return [found[f"{part}_s"] for part in PARTS]


def test_the_index_adds_up_every_field_of_the_account() -> None:
    account_of_nothing = account([], created_at=0, until=0).keys()
    money = Money.__annotations__.keys()
    assert GoodputTotals.__annotations__.keys() - {"runs", "money"} | money == account_of_nothing
    assert {f"{part}_s" for part in PARTS} | {"total_s"} <= account_of_nothing
    assert costs_of([], Prices()).keys() == money
    assert money <= StretchView.__annotations__.keys()


def span(**fields: Any) -> Span:
    return Span(**{"gpus": 4, **fields})


def test_the_goodput_of_one_attempt_without_faults() -> None:
    launch = LaunchSpan(
        started_at=12,
        loads_from=18,
        trained_from=20,
        trained_until=118,
        ended_at=119,
        resumed_step=0,
        last_step=98,
        held=((30.0, 34.0), (32.0, 36.0), (100.0, 102.0), (115.0, 130.0), (5.0, 21.0)),
    )
    only = span(submitted_at=0, started_at=10, ended_at=120, last_step=98, launches=(launch,))
    prices = Prices(gpu_hour=3.0, on_demand_per_gpu_hour=10.0, currency="EUR")
    found = account([only], created_at=0, until=120, prices=prices)
    assert found["queued_s"] == 10
    assert found["starting_s"] == 8
    assert found["loading_s"] == 2
    assert found["blocked_s"] == 6 + 2 + 3 + 1
    assert found["training_s"] == 98 - 12
    assert found["flushing_s"] == 2
    assert found["ettr"] == pytest.approx(86 / 120)
    assert found["steps_lost"] == 0
    assert found["gpu_hours"] == pytest.approx(4 * 110 / 3600)
    assert found["cost"] == pytest.approx(found["gpu_hours"] * 3.0)
    assert found["preemption_cost"] == 0
    assert found["on_demand_cost"] == pytest.approx(found["gpu_hours"] * 10.0)
    assert found["saved"] == pytest.approx(found["gpu_hours"] * 7.0)
    assert found["currency"] == "EUR"


def test_the_cost_of_preemptions() -> None:
    first = span(
        submitted_at=0,
        started_at=0,
        ended_at=110,
        is_preempted=True,
        launches=(LaunchSpan(trained_from=10, trained_until=100, resumed_step=0, last_step=90),),
    )
    second = span(
        gpus=2,
        submitted_at=110,
        started_at=115,
        ended_at=200,
        launches=(LaunchSpan(loads_from=120, trained_from=130, resumed_step=80, last_step=150),),
    )
    prices = Prices(gpu_hour=1.0, on_demand_per_gpu_hour=3.0)
    found = account([first, second], created_at=0, until=200, prices=prices)
    # 4 GPUs: a flush of 10 s and 10 lost steps of 1 s. 2 GPUs: a start of 5 s and a load of 10 s.
    wasted = (4 * (10 + 10) + 2 * (5 + 10)) / 3600
    assert found["preemption_gpu_hours"] == pytest.approx(wasted)
    assert found["preemption_cost"] == pytest.approx(wasted)
    assert found["on_demand_cost"] == pytest.approx(3 * ((4 * 110 + 2 * 85) / 3600 - wasted))


def test_each_attempt_costs_what_its_place_costs() -> None:
    spot = span(submitted_at=0, started_at=0, ended_at=3600)
    waited = span(submitted_at=3600, ended_at=3700)
    on_demand = span(gpus=2, gpu_hour=5.0, submitted_at=3700, started_at=3700, ended_at=7300)
    prices = Prices(gpu_hour=1.0, on_demand_per_gpu_hour=5.0)
    found = account([spot, waited, on_demand], created_at=0, until=7300, prices=prices)
    assert found["gpu_hours"] == pytest.approx(4 + 2)
    assert found["cost"] == pytest.approx(4 * 1.0 + 2 * 5.0)
    assert found["on_demand_cost"] == pytest.approx(6 * 5.0)
    alone = account([waited, on_demand], created_at=0, until=7300)
    assert alone["cost"] == pytest.approx(2 * 5.0), "the attempt that never ran needs no price"
    assert account([spot, on_demand], created_at=0, until=7300)["cost"] is None


def test_a_hang_does_not_count_as_training() -> None:
    launches = (
        LaunchSpan(started_at=5, trained_from=10, hangs_from=50, trained_until=80, ended_at=82),
        LaunchSpan(started_at=85, trained_from=90, ended_at=100),
    )
    found = account([span(started_at=0, ended_at=100, launches=launches)], created_at=0, until=100)
    assert found["training_s"] == 40 + 10
    assert found["hung_s"] == 30
    assert found["flushing_s"] == 2
    assert found["starting_s"] == 10 + 8


def marks(*lines: tuple[str, float, dict[str, Any]]) -> dict[int, tuple[LaunchSpan, ...]]:
    return launches_of(TimelineMark(1, kind, time, data) for kind, time, data in lines)


def test_launches_are_read_from_journal_lines() -> None:
    silent = [{"rank": 0, "silent_s": 12.0}, {"rank": 1, "silent_s": 10.0}, "nonsense"]
    first, second = marks(
        ("launch_started", 1, {"launch": 1}),
        ("resumed", 5, {"launch": 1, "step": 0, "load_s": 2.0}),
        ("staged", 9, {"launch": 1, "blocked_s": 0.5, "reason": "interval"}),
        ("hang_confirmed", 40, {"launch": 1, "silent": silent}),
        ("launch_ended", 44, {"launch": 1, "last_step": 20, "trained_until": 41.0}),
        ("launch_started", 45, {"launch": 2}),
        ("resumed", 50, {"launch": 2, "step": 18, "load_s": None}),
        ("stop_agreed", 60, {"step": 40}),
        ("staged", 62, {"launch": 2, "blocked_s": 0.5, "reason": "final"}),
        ("launch_ended", 64, {"launch": 2, "last_step": 40, "trained_until": 63.0}),
    )[1]
    assert first == LaunchSpan(
        started_at=1, loads_from=3, trained_from=5, held=((8.5, 9),), hangs_from=28,
        trained_until=41, ended_at=44, resumed_step=0, last_step=20,
    )  # fmt: skip
    assert second == LaunchSpan(
        started_at=45, trained_from=50, trained_until=61.5, ended_at=64,
        resumed_step=18, last_step=40,
    )  # fmt: skip


def test_a_launch_that_ends_while_its_ranks_are_silent_hung_until_its_end() -> None:
    begins: tuple[Any, ...] = (
        ("launch_started", 0, {"launch": 1}),
        ("resumed", 10, {"launch": 1, "step": 0}),
    )
    ends = {"launch": 1, "last_step": 40, "trained_until": 90.0, "hangs_from": 50.0}
    agreed: tuple[Any, ...] = ("stop_agreed", 70, {})
    staged: tuple[Any, ...] = ("staged", 40, {"launch": 1, "reason": "final"})
    for lines_between, training_s, hung_s, flushing_s in (
        # Ended by an error, or by a stop that silent ranks did not follow.
        ([], 40, 40, 10),
        ([agreed], 40, 40, 10),
        # Silent only while the last save was written.
        ([staged], 30, 0, 60),
    ):
        launches = marks(*begins, *lines_between, ("launch_ended", 92, ends))[1]
        found = account(
            [span(started_at=0, stop_requested_at=70, ended_at=100, launches=launches)],
            created_at=0,
            until=100,
        )
        assert (found["training_s"], found["hung_s"]) == (training_s, hung_s)
        assert found["flushing_s"] == flushing_s


def test_ranks_that_are_silent_now_hang_until_they_report_again() -> None:
    begins: tuple[Any, ...] = (
        ("launch_started", 0, {"launch": 1}),
        ("resumed", 10, {"launch": 1, "step": 0}),
    )
    suspected: tuple[Any, ...] = ("hang_suspected", 60, {"launch": 1, "all_silent_s": 20.0})
    cleared: tuple[Any, ...] = ("hang_cleared", 70, {"launch": 1})
    ends = {"launch": 1, "last_step": 40, "trained_until": 90.0, "hangs_from": None}
    ended: tuple[Any, ...] = ("launch_ended", 92, ends)
    for lines, ended_at, training_s, hung_s in (
        ([], None, 90, 0),
        ([suspected], None, 30, 60),
        # The agent was killed, so nobody recorded the end of the launch.
        ([suspected], 100, 30, 60),
        ([suspected, cleared], None, 90, 0),
        ([suspected, cleared, suspected], None, 30, 60),
        ([suspected, ended], 100, 80, 0),
    ):
        launches = marks(*begins, *lines)[1]
        found = account(
            [span(started_at=0, ended_at=ended_at, launches=launches)], created_at=0, until=100
        )
        assert (found["training_s"], found["hung_s"]) == (training_s, hung_s), lines


def test_repeated_steps_and_their_time_count_as_lost() -> None:
    first = span(
        submitted_at=0,
        started_at=0,
        ended_at=100,
        last_step=100,
        launches=(LaunchSpan(trained_from=0, ended_at=100, resumed_step=0),),
    )
    second = span(
        submitted_at=110,
        started_at=120,
        launches=(LaunchSpan(trained_from=125, resumed_step=70),),
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
    launches = tuple(LaunchSpan(trained_from=0, resumed_step=r, last_step=last) for r, last in legs)
    found = account([span(started_at=0, launches=launches)], created_at=0, until=1)
    return int(found["steps_lost"])


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


def test_attempts_without_launches_use_their_own_steps() -> None:
    first = span(started_at=0, ended_at=10, resumed_step=0, last_step=40)
    second = span(started_at=20, ended_at=30, resumed_step=25, last_step=50)
    found = account([first, second], created_at=0, until=30)
    assert found["steps_lost"] == 15
    assert found["lost_s"] + found["training_s"] == pytest.approx(20)
    assert found["stopped_s"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("safe_step", "ended_at", "lost"),
    [(0, 30, 25), (40, 30, 10), (50, 30, 0), (None, 30, 0), (0, None, 0)],
)
def test_uncommitted_steps_are_lost_once_the_attempt_has_ended(
    safe_step: int | None, ended_at: float | None, lost: int
) -> None:
    only = span(started_at=5, ended_at=ended_at, resumed_step=25, last_step=50)
    found = account([only], created_at=0, until=30, safe_step=safe_step)
    assert found["steps_lost"] == lost
    assert found["lost_s"] == pytest.approx(lost)
    assert found["training_s"] == pytest.approx(25 - lost)


def test_a_program_that_reports_no_step_has_no_training_time() -> None:
    launch = LaunchSpan(started_at=2, ended_at=24)
    found = account([span(started_at=1, ended_at=25, launches=(launch,))], created_at=0, until=25)
    assert (found["training_s"], found["ettr"]) == (0, 0)
    assert found["starting_s"] == pytest.approx(23)


def test_a_run_without_a_started_attempt_has_no_goodput() -> None:
    found = account([], created_at=5, until=5)
    assert found["total_s"] == 0
    assert found["ettr"] == 0
    waiting = account([span(submitted_at=5)], created_at=5, until=65)
    assert waiting["queued_s"] == 60
    assert waiting["gpu_hours"] == 0


times = st.none() | st.floats(min_value=-1e3, max_value=1e6)
steps = st.none() | st.integers(min_value=0, max_value=1000)
launches = st.builds(
    LaunchSpan,
    started_at=times,
    loads_from=times,
    trained_from=times,
    hangs_from=times,
    silent_from=times,
    trained_until=times,
    ended_at=times,
    resumed_step=steps,
    last_step=steps,
    held=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=3).map(tuple),
)
spans = st.builds(
    Span,
    gpus=st.integers(min_value=0, max_value=64),
    is_preempted=st.booleans(),
    submitted_at=times,
    started_at=times,
    stop_requested_at=times,
    ended_at=times,
    resumed_step=steps,
    last_step=steps,
    launches=st.lists(launches, max_size=3).map(tuple),
)


def is_whole(found: dict[str, Any]) -> bool:
    """True when no part is negative and the parts add up to the total."""
    parts = parts_of(found)
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(found["total_s"], abs=1e-3)
    assert 0 <= found["ettr"] <= 1
    assert found["steps_lost"] >= 0
    assert 0 <= found["preemption_gpu_hours"] <= found["gpu_hours"] + 1e-9
    return True


@given(st.lists(spans, max_size=4), st.floats(min_value=0, max_value=1e6))
def test_the_parts_add_up_for_any_timestamps(attempts: list[Span], until: float) -> None:
    found = account(attempts, created_at=0, until=until)
    assert is_whole(found)
    drawn = dict.fromkeys(PARTS, 0.0)
    for one in goodput.segments(attempts, created_at=0, until=until):
        drawn[one.part] += one.ended_at - one.began_at
    reported = {part: found[f"{part}_s"] for part in PARTS}
    assert drawn | {"stopped": reported["stopped"]} == pytest.approx(reported, abs=1e-3)


def test_segments_show_lost_time_at_the_end_of_the_launch_that_trained_it() -> None:
    first = LaunchSpan(
        started_at=5, trained_from=10, trained_until=110, ended_at=112, resumed_step=0, last_step=50
    )
    held = ((30.0, 34.0), (60.0, 60.5))
    again = LaunchSpan(
        started_at=113, loads_from=114, trained_from=116, resumed_step=40, held=held, last_step=90
    )
    only = span(submitted_at=0, started_at=2, ended_at=216, launches=(first, again))
    segments = goodput.segments([only], created_at=0, until=300, blocked_s_min=1.0)
    assert [(one.part, one.began_at, one.ended_at) for one in segments] == [
        ("queued", 0, 2),
        ("starting", 2, 5),
        ("starting", 5, 10),
        ("training", 10, 90),
        ("lost", 90, 110),
        ("flushing", 110, 112),
        ("starting", 112, 113),
        ("starting", 113, 114),
        ("loading", 114, 116),
        ("training", 116, 216),
    ]


nonsense = st.none() | st.text(max_size=3) | st.booleans() | st.lists(st.none(), max_size=1)
numbers = st.floats() | st.integers(-5, 2000) | nonsense
lines = st.tuples(
    st.sampled_from(KINDS),
    st.floats(0, 1e6),
    st.dictionaries(
        st.sampled_from(
            [
                *("launch", "step", "load_s", "blocked_s", "last_step", "trained_until"),
                *("silent", "hangs_from", "all_silent_s"),
            ]
        ),
        numbers,
    ),
)


@given(st.lists(lines, max_size=12), times, st.floats(min_value=0, max_value=1e6))
def test_the_parts_add_up_for_any_journal_lines(
    drawn: list[tuple[str, float, dict[str, Any]]], started_at: float | None, until: float
) -> None:
    """Lines in any order, with some missing, with clocks that jump and with invalid values."""
    found = marks(*drawn).get(1, ())
    assert is_whole(
        account([span(started_at=started_at, launches=found)], created_at=0, until=until)
    )


def test_parts_add_up_to_the_total() -> None:
    first = span(submitted_at=3, started_at=10, stop_requested_at=50, ended_at=60, last_step=9)
    found = account([first], created_at=0, until=80)
    assert sum(parts_of(found)) == found["total_s"] == 80
    assert found["flushing_s"] == 10


def test_an_outcome_of_an_older_attempt_counts_no_time_twice() -> None:
    first = span(submitted_at=0, started_at=10, ended_at=60, last_step=9)
    stale = span(submitted_at=70, started_at=80, ended_at=60, last_step=9)
    found = account([first, stale], created_at=0, until=100)
    assert sum(parts_of(found)) == 100
    assert found["training_s"] <= 50
