"""The clock of a host is off by an hour: whose orders they are, who supervises, or the nodes."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from tests.interleavings.explore import (
    ITEMS,
    UNPIN,
    Played,
    Schedule,
    clock_schedules,
    play_clock,
)
from tests.interleavings.situations import Situations
from tests.interleavings.test_pairs import Record, report


@pytest.mark.parametrize("item", [*ITEMS, UNPIN.name])
def test_a_clock_that_is_off_by_an_hour(
    situations: Situations, item: str, record_property: Record
) -> None:
    """In each situation one clock after the other is wrong; `make test-all` has all of them."""
    play_clocks(situations, list(clock_schedules(item))[::5], record_property)


@pytest.mark.slow
@pytest.mark.parametrize("item", [*ITEMS, UNPIN.name])
def test_every_clock_that_is_off_by_an_hour(
    situations: Situations, item: str, record_property: Record
) -> None:
    play_clocks(situations, list(clock_schedules(item)), record_property)


def play_clocks(situations: Situations, chosen: Iterable[Schedule], record: Record) -> None:
    began, count, broken = time.monotonic(), 0, list[Played]()
    for schedule in chosen:
        played = play_clock(situations, schedule)
        count += 1
        if played.problems:
            broken.append(played)
    record("interleavings", (count, time.monotonic() - began))
    assert count
    assert not broken, report(broken)
