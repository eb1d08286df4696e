"""A run whose successor waits in the queue meets orders, crashes and a slow controller."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import pytest
from tests.interleavings.explore import ITEMS, Schedule, calls_alone
from tests.interleavings.situations import Situations
from tests.interleavings.test_pairs import Record, play_all

STANDBY: Final = "standby"
# What meets a supervisor that submits, withdraws or adopts a successor.
MEETS: Final = (
    *("second", "cancel", "cancel now", "stop", "pause", "resume", "relaunch", "crash"),
    *("complete", "user error", "preempt", "dies", "node lost", "silent", "empty"),
)
FROM: Final = ("unfollowed", "running", "crashed", "failing", "pausing", "paused")


def _places(first: str, second: str) -> Iterator[str]:
    for name in FROM:
        known = "running" if name == "unfollowed" else name
        if all(known in ITEMS[one].situations for one in (first, second)):
            yield name


def _chosen(situations: Situations, first: str, second: str, most: int) -> Iterator[Schedule]:
    """Yield schedules in which the first actor is held at `most` drawn calls, and at none."""
    for name in _places(first, second):
        yield Schedule(name, STANDBY, first, second, None)
        if not ITEMS[first].is_process:
            continue
        calls = calls_alone(situations, name, STANDBY, ITEMS[first], ITEMS[second])
        changes = [n for n, call in enumerate(calls) if call.kind not in {"read", "list"}]
        chance = random.Random(f"{name} {first} {second}")
        for number in sorted(chance.sample(changes, min(most, len(changes)))):
            yield Schedule(name, STANDBY, first, second, number)


@pytest.mark.more
@pytest.mark.parametrize("other", MEETS)
def test_a_supervisor_with_a_successor(
    situations: Situations, other: str, record_property: Record
) -> None:
    chosen = [
        *_chosen(situations, "supervisor", other, 6),
        *_chosen(situations, other, "supervisor", 2),
    ]
    assert play_all(situations, chosen, record_property) == ""
