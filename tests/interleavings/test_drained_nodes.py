"""A job of several nodes leaves one that is drained, at any point of an order or a loss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest
from tests.interleavings import checks
from tests.interleavings.explore import OTHERS_LEAVE_S
from tests.interleavings.situations import START, Situations
from tests.interleavings.test_lost_nodes import HANDLED_S, ORDERS, begin, group_of, pass_time
from tests.interleavings.test_pairs import Record
from tests.interleavings.world import HORIZON_S, world_at

from holdfast.contracts.states import RunState

DRAINED: Final = 1
HOLDS_MAX: Final = 10
SUPERVISOR: Final = "supervisor"


@dataclass(frozen=True)
class Drain:
    """Node 1 is drained. `then` follows once the lead has made `held` changes.

    `then` is an order, or the number of a node that is lost. With `supervisor`, the supervisor is
    held instead, and killed, and another one takes over.
    """

    flavour: str
    then: str
    held: int

    def __str__(self) -> str:
        return f"{self.flavour}: node {DRAINED} drained, after {self.held} changes {self.then}"


def play(situations: Situations, drain: Drain) -> list[str]:
    """Play one schedule; return what went wrong, and the trace."""
    with world_at(situations.base, START) as world:
        group = begin(world, drain.flavour)
        held = world.supervisors[0] if drain.then == SUPERVISOR else group.nodes[0].actor
        if drain.then:
            held.hold_at_change = held.changes + drain.held + 1
        group.drain(DRAINED)
        limit = world.stage.now + HANDLED_S
        while not held.has_ended and held.state != "held" and world.stage.tick(limit):
            world.watch()
        if drain.then == SUPERVISOR:
            world.kill_supervisors()
            world.start_supervisor()
            pass_time(world, HANDLED_S)
        elif drain.then.isdecimal():
            group.lose(int(drain.then))
            pass_time(world, HANDLED_S)
        elif drain.then:
            world.stage.run(world.order(drain.then))  # type: ignore[arg-type]
            pass_time(world, HANDLED_S)
            # A relaunch keeps its size, and may wait for the node until its operator resumes it.
            group.resume(DRAINED)
        else:
            pass_time(world, HANDLED_S)
        world.leave_at(OTHERS_LEAVE_S)
        world.wait_until_calm(lambda: not checks.problems(world), HORIZON_S)
        found = checks.problems(world) + checks.late_attempts(world)
        history, newest = world.history(), max(group.launches)
        if drain.then not in ORDERS:
            if group_of(world) is not group or history.state is not RunState.RUNNING:
                found.append(f"attempt 1 ended: {history.state}")
            # A drained node may lead, and is not left then.
            left = drain.then == "0" or group.nodes[DRAINED] not in group.launches[newest]
            if group.whole != [newest] or not left:
                found.append(f"{group.whole} of {sorted(group.launches)} train, with node 1")
        assert not world.cluster.strange, world.cluster.strange
        return [f"{drain}: {'; '.join(found)}", *world.stage.trace] if found else []


def schedules(most: int) -> Iterator[Drain]:
    for flavour in ("spares", "shrinks"):
        for then in ("", *ORDERS, SUPERVISOR, "0", "1", "2", "3"):
            # Between the departure and the next launch, no other node could lead.
            if (flavour, then) == ("spares", "0"):
                continue
            chance = random.Random(f"{flavour} {then}")
            for held in sorted(chance.sample(range(HOLDS_MAX), most if then else 1)):
                yield Drain(flavour, then, held)


def play_all(situations: Situations, chosen: list[Drain], record: Record) -> list[str]:
    record("interleavings", (len(chosen), 0.0))
    for drain in chosen:
        if found := play(situations, drain):
            return found
    return []


@pytest.mark.timeout(300)
def test_an_attempt_leaves_a_drained_node(situations: Situations, record_property: Record) -> None:
    drawn = random.Random("short").sample(list(schedules(1)), 5)
    assert "\n".join(play_all(situations, drawn, record_property)) == ""


@pytest.mark.more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flavour", ["spares", "shrinks"])
def test_an_attempt_leaves_a_drained_node_at_any_point(
    situations: Situations, flavour: str, record_property: Record
) -> None:
    chosen = [one for one in schedules(3) if one.flavour == flavour]
    assert "\n".join(play_all(situations, chosen, record_property)) == ""
