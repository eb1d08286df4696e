"""The figures of `holdfast_bench.frameworks`: what a save blocks, and how long a step is."""

from __future__ import annotations

import itertools

import pytest

from holdfast_bench.frameworks.steps import blocked, usual_step


def starts_of(lengths: list[float]) -> list[float]:
    return list(itertools.accumulate(lengths, initial=0.0))


def test_a_save_blocks_for_the_time_beyond_a_usual_step() -> None:
    # Saves after steps 8 and 16. The step after each of them is slow too, and does not count.
    lengths = [9.0, 5.0, *(1.0,) * 5, 3.0, 2.0, *(1.0,) * 6, 3.5, 2.0, 1.0]
    assert blocked(starts_of(lengths), 8) == pytest.approx([2.0, 2.5])


def test_a_usual_step_is_the_median_of_later_ones() -> None:
    assert usual_step(starts_of([50.0, 50.0, *(1.0,) * 10, *(2.0,) * 8])) == pytest.approx(1.0)
