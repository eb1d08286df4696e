"""The figures of `holdfast_bench.frameworks`: what a save blocks, and how long a step is."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast_bench.frameworks.steps import (
    TURN_STEPS,
    WARM_UP_TURNS,
    Turns,
    blocked,
    extra_per_step,
    turns_of,
    usual_step,
)


def starts_of(lengths: list[float]) -> list[float]:
    return list(itertools.accumulate(lengths, initial=0.0))


def test_a_save_blocks_for_the_time_beyond_a_usual_step() -> None:
    # Saves after steps 8 and 16. The step after each of them is slow too, and does not count.
    lengths = [9.0, 5.0, *(1.0,) * 5, 3.0, 2.0, *(1.0,) * 6, 3.5, 2.0, 1.0]
    assert blocked(starts_of(lengths), 8) == pytest.approx([2.0, 2.5])


def test_what_a_step_takes_longer_is_compared_turn_by_turn() -> None:
    """The machine becomes slower in the middle, for both programs. The first turns do not count."""
    turn, slow = [1.0] * TURN_STEPS, [3.0] * TURN_STEPS
    own = starts_of([*[9.0] * TURN_STEPS * WARM_UP_TURNS, *turn * 3, *slow * 2])
    # The first steps of a turn are slow, and the last contains the wait for the other program.
    mine = [8.0, 8.0, *(1.5,) * (TURN_STEPS - 3), 70.0]
    slower = [8.0, 8.0, *(3.5,) * (TURN_STEPS - 3), 70.0]
    ours = starts_of([*[2.0] * TURN_STEPS * WARM_UP_TURNS, *mine * 3, *slower * 2])
    assert extra_per_step(own, ours) == pytest.approx(0.5)
    assert usual_step(own) == pytest.approx(1.0)


def test_two_programs_step_in_turns(tmp_path: Path) -> None:
    order: list[str] = []

    def step(kind: str) -> None:
        turns = Turns(tmp_path, kind)
        for number in range(2 * TURN_STEPS):
            turns.before_step(number)
            order.append(kind)
        turns.pass_on(9)

    with turns_of(("own", "holdfast"), tmp_path), ThreadPoolExecutor(2) as pool:
        list(pool.map(step, ("holdfast", "own"), timeout=60))
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(order)]
    assert runs == [(kind, TURN_STEPS) for kind in ("own", "holdfast")] * 2
