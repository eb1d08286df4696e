"""Jobs of several nodes lose some of them, at any point of an order, a takeover or another loss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest
from tests.interleavings import checks, several_nodes
from tests.interleavings.explore import OTHERS_LEAVE_S
from tests.interleavings.several_nodes import JobOfNodes
from tests.interleavings.situations import START, Situations
from tests.interleavings.test_pairs import Record
from tests.interleavings.world import HORIZON_S, World, world_at

from holdfast.contracts.states import RunState
from holdfast.workers.agent import succession

READY_S: Final = 120.0
HANDLED_S: Final = 180.0
NODES: Final = 4
ORDERS: Final = ("pause", "stop", "cancel", "relaunch")
HOLDS_MAX: Final = 16
STALLS_S: Final = 60.0


@dataclass(frozen=True)
class Losses:
    """Node `first` is lost, or only cut off. `then` follows once its handler made `held` changes.

    The handler is the agent that leads, or that takes over. `then` is an order, or the number of
    another node that is lost. The handler itself stalls for `stalls_s` seconds.
    """

    flavour: str
    first: int
    is_cut: bool
    then: str
    held: int
    stalls_s: float = 0.0

    def __str__(self) -> str:
        how = "cut off" if self.is_cut else "lost"
        then = self.then or f"a stall of {self.stalls_s} s"
        return f"{self.flavour}: node {self.first} {how}, after {self.held} changes {then}"


def group_of(world: World) -> JobOfNodes:
    (found, _) = list(world.agents.values())[-1]
    assert isinstance(found, JobOfNodes)
    return found


def begin(world: World, flavour: str) -> JobOfNodes:
    """Let attempt 1 train on all its nodes."""
    world.create(flavour)
    world.start_supervisor()
    limit = world.stage.now + READY_S
    while not (world.agents and group_of(world).trains):
        assert world.stage.tick(limit), world.stage.tail()
    pass_time(world, 12.0)
    return group_of(world)


def pass_time(world: World, seconds: float) -> None:
    limit = world.stage.now + seconds
    while world.stage.tick(limit):
        world.watch()


def play(situations: Situations, losses: Losses) -> list[str]:
    """Play one schedule; return what went wrong, and the trace."""
    with world_at(situations.base, START) as world:
        group = begin(world, losses.flavour)
        handler = group.nodes[1 if losses.first == 0 else 0].actor
        handler.hold_at_change = handler.changes + losses.held + 1
        (group.cut if losses.is_cut else group.lose)(losses.first)
        limit = world.stage.now + HANDLED_S
        while not handler.has_ended and handler.state != "held" and world.stage.tick(limit):
            world.watch()
        if losses.stalls_s:
            handler.wake_at += losses.stalls_s
            pass_time(world, losses.stalls_s + HANDLED_S)
        if losses.then.isdecimal():
            group.lose(int(losses.then))
            # Nothing changes while the nodes that are left wait for silence.
            pass_time(world, HANDLED_S)
        elif losses.then:
            world.stage.run(world.order(losses.then))  # type: ignore[arg-type]
        world.leave_at(OTHERS_LEAVE_S)
        world.wait_until_calm(lambda: not checks.problems(world), HORIZON_S)
        found = checks.problems(world) + checks.late_attempts(world)
        found += ended_too_early(world, group, losses)
        assert not world.cluster.strange, world.cluster.strange
        return [f"{losses}: {'; '.join(found)}", *world.stage.trace] if found else []


def ended_too_early(world: World, group: JobOfNodes, losses: Losses) -> list[str]:
    """Return the attempt that ended although its job had the nodes to continue."""
    # A spare node cannot know whether a launch trains without it, see decision 97.
    is_all = losses.flavour == "spares" and {str(losses.first), losses.then} == {"0", "1"}
    if losses.then in ORDERS or is_all:
        return []
    first, history = world.paths.attempt(1), world.history()
    if len(history.attempts) > 1 or history.state is not RunState.RUNNING:
        return [f"attempt 1 ended, {history.state}, and {len(history.attempts)} attempts followed"]
    if first.outcome.exists() or len(group.whole) != 1 or max(group.launches) < 2:
        return [f"attempt 1 has the launches {sorted(group.launches)}, and {group.whole} train"]
    return []


def schedules(most: int) -> Iterator[Losses]:
    """Yield schedules, with `most` drawn points at which the second event follows."""
    for flavour, others in (("spares", ("1", "2")), ("shrinks", ("1", "2", "3"))):
        for first in (0, 1):
            for then in ("", *ORDERS, *(one for one in ("0", *others) if one != str(first))):
                chance = random.Random(f"{flavour} {first} {then}")
                for held in sorted(chance.sample(range(HOLDS_MAX), most if then else 1)):
                    yield Losses(flavour, first, is_cut=False, then=then, held=held)
            yield Losses(flavour, first, is_cut=True, then="", held=0)
        # The lead is slow, and the node that it has lost is alive.
        chance = random.Random(flavour)
        for held in sorted(chance.sample(range(HOLDS_MAX), most)):
            yield Losses(flavour, 1, is_cut=True, then="", held=held, stalls_s=STALLS_S)


def play_all(situations: Situations, chosen: list[Losses], record: Record) -> list[str]:
    record("interleavings", (len(chosen), 0.0))
    for losses in chosen:
        if found := play(situations, losses):
            return found
    return []


@pytest.mark.timeout(300)
def test_an_attempt_loses_a_node(situations: Situations, record_property: Record) -> None:
    chosen = list(schedules(1))
    drawn = random.Random("short").sample(chosen, 8)
    assert "\n".join(play_all(situations, drawn, record_property)) == ""


@pytest.mark.more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flavour", ["spares", "shrinks"])
@pytest.mark.parametrize("first", [0, 1])
def test_an_attempt_loses_nodes_at_any_point(
    situations: Situations, flavour: str, first: int, record_property: Record
) -> None:
    chosen = [one for one in schedules(4) if (one.flavour, one.first) == (flavour, first)]
    assert "\n".join(play_all(situations, chosen, record_property)) == ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("takes_term", [True, False])
def test_the_schedules_find_a_lead_that_takes_no_term(
    situations: Situations, monkeypatch: pytest.MonkeyPatch, takes_term: bool
) -> None:
    """Storage shows no heartbeats, so a node takes over from a lead that is only cut off."""
    monkeypatch.setattr(succession, "heartbeat_stamp", lambda attempt: ())
    if not takes_term:
        monkeypatch.setattr(several_nodes, "renew", lambda context, **_: 2)
        monkeypatch.setattr(several_nodes, "begin_term", lambda context, number: None)
    found = play(situations, Losses("shrinks", 0, is_cut=True, then="", held=0))
    assert ("train at once" in "".join(found[:1])) is not takes_term


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize("decides", [True, False])
def test_the_schedules_find_a_lead_that_begins_a_term_that_is_void(
    situations: Situations, monkeypatch: pytest.MonkeyPatch, decides: bool
) -> None:
    """It stalls after it took the term, and the node that it has lost takes over meanwhile."""
    if not decides:
        monkeypatch.setattr(several_nodes, "begin_term", lambda context, number: None)
    stalls = [
        Losses("shrinks", 1, is_cut=True, then="", held=held, stalls_s=STALLS_S)
        for held in range(3, 8)
    ]
    found = (play(situations, losses) for losses in stalls)
    assert any("train at once" in lines[0] for lines in found if lines) is not decides
