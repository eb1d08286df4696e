"""All pairs of actors, the first one held before the calls that matter, played to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import combinations_with_replacement

import pytest
from tests.interleavings.explore import (
    ITEMS,
    Played,
    Schedule,
    calls_alone,
    one_each,
    places,
    play,
    schedules,
)
from tests.interleavings.situations import Situations

PAIRS = [pair for pair in combinations_with_replacement(ITEMS, 2) if any(places(*pair))]
# The short tests explore these more closely.
KNOWN = [
    ("supervisor", "cancel"),
    ("supervisor", "relaunch"),
    ("supervisor", "second"),
    ("supervisor", "empty"),
    ("cancel", "relaunch"),
    ("cancel", "grow"),
    ("cancel", "fallback"),
    ("cancel", "silent"),
    ("pin", "prune"),
]
Record = Callable[[str, object], None]


def play_all(
    situations: Situations,
    chosen: Iterable[Schedule],
    record: Record,
    play: Callable[[Situations, Schedule], Played] = play,
) -> str:
    """Play schedules, and return all that went wrong and the trace of the first of them, or ''."""
    began, count, broken = time.monotonic(), 0, list[Played]()
    for schedule in chosen:
        played = play(situations, schedule)
        count += 1
        if played.problems:
            broken.append(played)
    record("interleavings", (count, time.monotonic() - began))
    assert count
    return report(broken) if broken else ""


def report(broken: list[Played]) -> str:
    """Return what went wrong in which schedules, and what the actors of the first one did."""
    lines = [f"{one.schedule}: {'; '.join(one.problems)}" for one in broken[:20]]
    more = [f"… and {len(broken) - 20} more schedules"] if len(broken) > 20 else []
    return "\n".join([*lines, *more, "", *broken[0].trace])


def both_ways(
    situations: Situations, first: str, second: str, most: int | None
) -> Iterable[Schedule]:
    yield from schedules(situations, first, second, most)
    if first != second:
        yield from schedules(situations, second, first, most)


@pytest.mark.more
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_pair(situations: Situations, first: str, second: str, record_property: Record) -> None:
    assert play_all(situations, one_each(situations, first, second), record_property) == ""


@pytest.mark.more
@pytest.mark.parametrize(("first", "second"), KNOWN)
def test_a_pair_that_has_gone_wrong_before(
    situations: Situations, first: str, second: str, record_property: Record
) -> None:
    assert play_all(situations, both_ways(situations, first, second, 2), record_property) == ""


OTHERS = [name for name, one in ITEMS.items() if "running" in one.situations]


@pytest.mark.more
@pytest.mark.parametrize("other", [name for name in OTHERS if ITEMS[name].flavour == "plain"])
def test_a_run_on_every_node_of_its_partition_loses_one(
    situations: Situations, other: str, record_property: Record
) -> None:
    """The node is repaired a while later, and the run continues."""
    calls = calls_alone(situations, "running", "whole", ITEMS[other], ITEMS["node lost"])
    chosen = [Schedule("running", "whole", "node lost", other, None)]
    chosen += [
        Schedule("running", "whole", other, "node lost", held_at)
        for held_at in range(0, len(calls), max(len(calls) // 4, 1))
    ]
    assert play_all(situations, chosen, record_property) == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_pair_held_before_every_call_that_matters(
    situations: Situations, first: str, second: str, record_property: Record
) -> None:
    assert play_all(situations, both_ways(situations, first, second, None), record_property) == ""
