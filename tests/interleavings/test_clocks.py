"""The clock of a host is off by an hour: whose orders they are, who supervises, or the nodes."""

from __future__ import annotations

import time

import pytest

from tests.interleavings.explore import ITEMS, UNPIN, Played, clock_schedules, play_clock
from tests.interleavings.situations import Situations
from tests.interleavings.test_pairs import Record, report


@pytest.mark.parametrize("item", [*ITEMS, UNPIN.name])
def test_a_clock_that_is_off_by_an_hour(
    situations: Situations, item: str, record_property: Record
) -> None:
    began, count, broken = time.monotonic(), 0, list[Played]()
    for schedule in clock_schedules(item):
        played = play_clock(situations, schedule)
        count += 1
        if played.problems:
            broken.append(played)
    record_property("interleavings", (count, time.monotonic() - began))
    assert count
    assert not broken, report(broken)
