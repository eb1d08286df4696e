"""A run whose successor waits in the queue meets orders, crashes and a slow controller.

So does one whose job Slurm restarts after a node failure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import pytest
from tests.interleavings.explore import ITEMS, SLOW, Schedule, calls_alone
from tests.interleavings.situations import Situations
from tests.interleavings.test_pairs import Record, play_all

STANDBY: Final = "standby"
EXPEDITE: Final = "expedite"
# What meets a supervisor that submits, withdraws or adopts a successor.
MEETS: Final = (
    *("second", "cancel", "cancel now", "stop", "pause", "resume", "relaunch", "crash"),
    *("complete", "user error", "preempt", "dies", "node lost", "silent", "empty"),
    SLOW.name,
)
KNOWN: Final = {**ITEMS, SLOW.name: SLOW}
FROM: Final = {
    STANDBY: ("unfollowed", "running", "crashed", "failing", "pausing", "paused"),
    EXPEDITE: ("expediting", "running", "crashed", "failing", "pausing", "paused"),
}
# The situation of a run without a successor in which the same actors have something to do.
KNOWN_AS: Final = {"unfollowed": "running", "expediting": "crashed"}


def _places(first: str, second: str, flavour: str) -> Iterator[str]:
    for name in FROM[flavour]:
        known = KNOWN_AS.get(name, name)
        if all(known in KNOWN[one].situations for one in (first, second)):
            yield name


def _chosen(
    situations: Situations, first: str, second: str, most: int, flavour: str
) -> Iterator[Schedule]:
    """Yield schedules in which the first actor is held at `most` drawn calls, and at none."""
    for name in _places(first, second, flavour):
        yield Schedule(name, flavour, first, second, None)
        if not KNOWN[first].is_process:
            continue
        calls = calls_alone(situations, name, flavour, KNOWN[first], KNOWN[second])
        changes = [n for n, call in enumerate(calls) if call.kind not in {"read", "list"}]
        chance = random.Random(f"{name} {first} {second}")
        for number in sorted(chance.sample(changes, min(most, len(changes)))):
            yield Schedule(name, flavour, first, second, number)


@pytest.mark.more
@pytest.mark.parametrize(("flavour", "most"), [(STANDBY, (6, 2)), (EXPEDITE, (3, 1))])
@pytest.mark.parametrize("other", MEETS)
def test_a_supervisor_with_a_successor_or_a_restart(
    situations: Situations,
    other: str,
    flavour: str,
    most: tuple[int, int],
    record_property: Record,
) -> None:
    chosen = [
        *_chosen(situations, "supervisor", other, most[0], flavour),
        *_chosen(situations, other, "supervisor", most[1], flavour),
    ]
    assert play_all(situations, chosen, record_property) == ""
