"""The clock of a host is off by an hour: whose orders they are, who supervises, or the nodes."""

from __future__ import annotations

import pytest
from tests.interleavings.explore import ITEMS, UNPIN, clock_schedules, play_clock
from tests.interleavings.situations import Situations
from tests.interleavings.test_pairs import Record, play_all


@pytest.mark.more
@pytest.mark.parametrize("item", [*ITEMS, UNPIN.name])
def test_a_clock_that_is_off_by_an_hour(
    situations: Situations, item: str, record_property: Record
) -> None:
    """In each situation one clock after the other is wrong; `make test-all` has all of them."""
    assert play_all(situations, list(clock_schedules(item))[::5], record_property, play_clock) == ""


@pytest.mark.slow
@pytest.mark.parametrize("item", [*ITEMS, UNPIN.name])
def test_every_clock_that_is_off_by_an_hour(
    situations: Situations, item: str, record_property: Record
) -> None:
    assert play_all(situations, clock_schedules(item), record_property, play_clock) == ""
