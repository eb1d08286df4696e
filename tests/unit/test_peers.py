"""The comparison with other systems: the drawn faults, and the results in its table."""

from __future__ import annotations

import itertools
import json

import pytest
from benchmarks.peers.faults import (
    GAP_STEPS,
    Cost,
    Fault,
    Job,
    Line,
    cost_of,
    draw,
    ettr_of,
    read_lines,
)
from benchmarks.peers.report import table
from benchmarks.peers.runner import Outcome

JOB = Job(steps=240, step_s=0.5)
KINDS = ("kill-rank", "kill-rank", "sigterm")


def test_a_seed_gives_the_same_faults_spaced_out_after_the_first_save() -> None:
    for seed in range(50):
        faults = draw(seed, KINDS, JOB, ranks=2)
        assert faults == draw(seed, KINDS, JOB, ranks=2)
        assert [fault.kind for fault in faults] == list(KINDS)
        steps = [JOB.save_steps, *(fault.step for fault in faults), JOB.steps]
        assert steps == sorted(set(steps))
        assert all(b - a >= GAP_STEPS for a, b in itertools.pairwise(steps[1:]))
    drawn = {fault.rank for seed in range(50) for fault in draw(seed, KINDS, JOB, ranks=2)[:2]}
    assert drawn == {0, 1}


def test_faults_that_do_not_fit_into_the_job_are_refused() -> None:
    with pytest.raises(ValueError, match="--steps"):
        draw(1, KINDS, Job(steps=100), ranks=2)
    with pytest.raises(ValueError, match="last 90 s"):
        draw(1, KINDS, JOB, ranks=2, rest_s=90.0)


def test_lost_steps_count_from_the_last_step_of_the_affected_process() -> None:
    text = "".join(
        json.dumps({"time": time, "pid": pid, "step": step}) + "\n"
        for time, pid, step in ((1.0, 5, 59), (2.0, 5, 60), (2.5, 5, 61), (9.0, 6, 51))
    )
    lines = read_lines(text + '{"time": 9.5, "pi')
    fault = Fault(kind="sigterm", step=60)
    assert cost_of(fault, 2.1, 5, lines) == Cost(
        kind="sigterm", step=60, steps_lost=11, seconds=9.0 - 2.1
    )
    assert cost_of(fault, 2.1, 5, lines[:3], "why") == Cost(kind="sigterm", step=60, by_hand="why")


def test_ettr_counts_each_step_once_and_needs_the_last_step() -> None:
    lines = [Line(time=100.0 + step, pid=1, step=step) for step in range(1, 241)]
    assert ettr_of(JOB, 100.0, lines) == pytest.approx(0.5)
    assert ettr_of(JOB, 100.0, lines[:-1]) is None


def test_a_row_shows_which_faults_recovered() -> None:
    costs = [
        Cost(kind="kill-rank", step=60, steps_lost=10, seconds=2.54),
        Cost(kind="kill-rank", step=90, steps_lost=0, seconds=3.0, by_hand="it had ended"),
    ]
    whole = Outcome("holdfast", "local", costs, start_s=5.06, ettr=0.617)
    never = Outcome("nvrx", "local", [Cost(kind="sigterm", step=70)], problem="it ended")
    missing = Outcome("dlrover", "local", problem="not installed: no network")
    rows = [row.strip("| ").split(" | ") for row in table([whole, never, missing]).splitlines()]
    assert rows[0][2:6] == [
        *("kill-rank: steps lost", "kill-rank: first new step, s"),
        *("sigterm: steps lost", "sigterm: first new step, s"),
    ]
    assert rows[2][1:4] == ["5.1", "10, 0", "2.5, never (by hand 3.0)"]
    assert rows[2][-1] == "kill-rank: it had ended"
    assert rows[2][-2] == "(0.62)"
    assert rows[3][4:6] == ["all", "never"]
    assert rows[3][-1] == "it ended"
    assert rows[4][-1] == "not installed: no network"
