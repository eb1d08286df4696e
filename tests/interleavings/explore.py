"""Plays two actors against each other, the first one held before each call that matters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.interleavings import checks
from tests.interleavings.situations import Situations
from tests.interleavings.stage import CALLS_MAX, Actor, Call
from tests.interleavings.world import HORIZON_S, POLL_S, Situation, World, world_at

# A supervisor does everything that a situation calls for within this many turns.
TURNS: Final = 2
OTHERS_LEAVE_S: Final = 220.0
QUEUED_HOLD_S: Final = 150.0
HOUR_S: Final = 3600.0
SILENT_S: Final = 60.0


@dataclass(frozen=True)
class Item:
    """One of the actors that are played against each other.

    `start` adds its process and returns it, or does at once what is not a process.
    """

    name: str
    start: Callable[[World], Any]
    situations: tuple[str, ...]
    flavour: str = "plain"
    # False if a supervisor must not have looked at the run before.
    follows_supervisor: bool = True
    is_supervisor: bool = False
    # False for what happens at once, such as a lost node.
    is_process: bool = True


def _supervisor(world: World) -> Actor:
    return world.start_supervisor()


def _agent_ends(how: str) -> Callable[[World], Actor | None]:
    def start(world: World) -> Actor | None:
        for agent, actor in world.agents.values():
            if agent.trains:
                agent.ends = how
                # It looks when it wakes up.
                actor.wake_at = world.stage.now
                return actor
        return None

    return start


def _lose_node(world: World) -> None:
    for job in world.live_jobs:
        if job.state == "RUNNING":
            world.cluster.lose_node(job)


def _silence(world: World) -> None:
    world.cluster.silent_until = world.stage.now + SILENT_S


def _slow(world: World) -> None:
    """Slurm does what it is asked, and its answers come too late."""
    _silence(world)
    world.cluster.hears = True


def _preempt(world: World) -> Actor | None:
    """Slurm takes the job back by a signal."""
    for agent, actor in world.agents.values():
        if agent.trains:
            agent.signals.append("SIGTERM")
            actor.wake_at = world.stage.now
            return actor
    return None


def _lose_idle(world: World) -> None:
    """The leading node of the running job is lost, or one that is idle."""
    if not any(job.state == "RUNNING" for job in world.live_jobs):
        world.cluster.nodes["n1"].is_up = False
    _lose_node(world)


LIVE: Final = ("queued", "running", "crashed", "pausing", "paused", "unanswered")
ALL: Final = (*LIVE, "failing", "failed")
HAS_AGENT: Final = ("running", "pausing")
SAVED: Final = ("running", "crashed", "paused")
LOOKED_AT: Final = frozenset({"running", "queued", "pausing", "paused", "unfollowed"})
MAY_MOVE: Final = ("queued", "running", "pausing", "paused")

ITEMS: Final = {
    item.name: item
    for item in (
        Item("supervisor", _supervisor, ("fresh", *ALL), is_supervisor=True),
        Item("second", _supervisor, ("fresh", *ALL), is_supervisor=True),
        Item("stay", lambda w: w.stay(), ("fresh", *ALL), is_supervisor=True),
        Item("cancel", lambda w: w.order("cancel"), ("fresh", *LIVE, "failing")),
        Item("cancel now", lambda w: w.order("cancel", now=True), ("fresh", *LIVE, "failing")),
        Item("stop", lambda w: w.order("stop"), ("fresh", *LIVE, "failing")),
        Item("pause", lambda w: w.order("pause"), ("fresh", *LIVE, "failing")),
        Item("resume", lambda w: w.order("resume"), ("pausing", "paused")),
        Item("relaunch", lambda w: w.order("relaunch", 4), ALL),
        Item("pin", lambda w: w.pin(), SAVED, follows_supervisor=False),
        Item("prune", lambda w: w.prune(), SAVED, follows_supervisor=False),
        Item("grow", _supervisor, MAY_MOVE, "grow", False, True),
        Item("fallback", _supervisor, MAY_MOVE, "fallback", False, True),
        Item("crash", _agent_ends("crash"), HAS_AGENT),
        Item("complete", _agent_ends("complete"), HAS_AGENT),
        Item("user error", _agent_ends("user_error"), HAS_AGENT),
        Item("preempt", _preempt, HAS_AGENT),
        Item("dies", lambda w: w.kill_supervisors(), ("fresh", *ALL), is_process=False),
        Item("node lost", _lose_idle, ALL, is_process=False),
        Item("silent", _silence, ALL, is_process=False),
        Item("empty", lambda w: w.cluster.restart_empty(), ALL, is_process=False),
    )
}


# Only for runs with a successor or a restart. Played with every other actor, it would take long.
SLOW: Final = Item("slow", _slow, ALL, is_process=False)


@dataclass(frozen=True)
class Schedule:
    """One way to play two actors: `first` is held before its call number `held_at` + 1."""

    situation: str
    flavour: str
    first: str
    second: str
    held_at: int | None
    # Whose clock is wrong, and by how many seconds it is ahead.
    clock: tuple[str, float] | None = None

    def __str__(self) -> str:
        held = "not held" if self.held_at is None else f"held after {self.held_at} calls"
        text = f"{self.situation}/{self.flavour}: {self.first} ({held}), then {self.second}"
        return text if self.clock is None else f"{text}; {self.clock[0]} {self.clock[1]:+.0f} s"


@dataclass
class Played:
    """What came of a schedule."""

    schedule: Schedule
    problems: list[str]
    first_calls: list[Call] = field(default_factory=list)
    second_calls: list[Call] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


def play(situations: Situations, schedule: Schedule) -> Played:
    """Play one schedule to its end, and check the run."""
    situation = situations.get(schedule.situation, schedule.flavour)
    with world_at(situations.base, 0.0, situation) as world:
        world.started_as = situation.name
        known = {**ITEMS, SLOW.name: SLOW}
        first, second = known[schedule.first], known[schedule.second]
        before(world, situation, first, second)
        one = _begin(world, first, schedule.held_at)
        two = second.start(world)
        if isinstance(two, Actor):
            world.stage.run(two)
        else:
            two = None
        if one is not None:
            world.stage.run(one)
        after(world)
        wait_until_calm(world)
        found = checks.problems(world) + checks.late_attempts(world)
        assert not world.cluster.strange, world.cluster.strange
        return Played(
            schedule,
            found,
            one.calls if one else [],
            two.calls if two else [],
            list(world.stage.trace) if found else [],
        )


# What somebody with a right clock orders once all is calm.
FOLLOWS: Final = {
    "pause": ("resume",),
    "cancel": ("relaunch",),
    "relaunch": ("pause", "resume"),
    "resume": ("pause",),
    "unpin": ("pin", "prune"),
}


def play_clock(situations: Situations, schedule: Schedule) -> Played:
    """Play one actor while a clock is wrong, and then what follows by a right clock."""
    situation = situations.get(schedule.situation, schedule.flavour)
    assert schedule.clock is not None
    with world_at(situations.base, 0.0, situation) as world:
        world.started_as = situation.name
        world.ahead_s = dict([schedule.clock])
        for _, actor in world.agents.values():
            actor.ahead_s = world.ahead_s.get("nodes", 0.0)
        first = {**ITEMS, "unpin": UNPIN}[schedule.first]
        world.leave_at(OTHERS_LEAVE_S)
        if first.name == "unpin":
            world.stage.run(world.pin())
            world.pins.clear()
        _begin(world, first, None)
        if not first.is_supervisor:
            after(world)
        found = []
        if first.follows_supervisor:
            wait_until_calm(world)
            found = checks.problems(world)
        world.ahead_s.pop("orders", None)
        for name in FOLLOWS.get(first.name, ()):
            _begin(world, ITEMS[name], None)
            if ITEMS[name].follows_supervisor:
                wait_until_calm(world)
                found += [f"then {name}: {one}" for one in checks.problems(world)]
        wait_until_calm(world)
        found += checks.problems(world)
        return Played(schedule, found, trace=list(world.stage.trace) if found else [])


UNPIN: Final = Item("unpin", lambda w: w.unpin(), ("running",), follows_supervisor=False)


def clock_schedules(name: str) -> Iterator[Schedule]:
    """Yield every schedule in which the item `name` meets a clock that is off by an hour."""
    item = {**ITEMS, UNPIN.name: UNPIN}[name]
    for situation in item.situations:
        for whose in ("orders", "supervisors", "nodes"):
            for ahead_s in (HOUR_S, -HOUR_S):
                clock = whose, ahead_s
                yield Schedule(situation, item.flavour, name, "clock", None, clock)


def before(world: World, situation: Situation, *items: Item) -> None:
    """Let a supervisor look at the run first, if it has one that is not played itself."""
    world.leave_at(OTHERS_LEAVE_S)
    if lets_look(*items) and situation.name in LOOKED_AT:
        world.stage.run(world.start_supervisor())


def lets_look(*items: Item) -> bool:
    """Return True if a supervisor may look at the run before these items."""
    return all(item.follows_supervisor and not item.is_supervisor for item in items)


def _begin(world: World, item: Item, held_at: int | None) -> Actor | None:
    actor = item.start(world)
    if not isinstance(actor, Actor):
        return None
    if held_at is None:
        world.stage.run(actor)
    else:
        world.stage.run_to(actor, held_at, TURNS * POLL_S)
    return actor


def after(world: World) -> None:
    """If the run was promised a supervisor and none is there, one starts, as after a crash."""
    is_promised = world.started_as != "failed" or world.has_killed
    if is_promised and world.lacks_supervisor:
        world.start_supervisor()


def wait_until_calm(world: World) -> None:
    """Let time pass until nothing is wrong, for as long as that may take."""
    if world.started_as == "queued" and not _gets_calm(world, QUEUED_HOLD_S):
        # A job in the queue is cancelled long before it would start.
        orders = checks.accepted_orders(world)
        if orders and orders[-1].action in checks.HOLDS:
            return
    _gets_calm(world, HORIZON_S)


def _gets_calm(world: World, horizon_s: float) -> bool:
    return world.wait_until_calm(lambda: not checks.problems(world), horizon_s)


def calls_alone(
    situations: Situations, situation: str, flavour: str, first: Item, second: Item
) -> list[Call]:
    """Return the calls that `first` makes by itself, in the turns in which it may be held."""
    key = situation, flavour, first.name, lets_look(first, second)
    if key not in situations.calls:
        recorded = situations.get(situation, flavour)
        with world_at(situations.base, 0.0, recorded) as world:
            world.started_as = recorded.name
            before(world, recorded, first, second)
            actor = _begin(world, first, CALLS_MAX)
            situations.calls[key] = actor.calls if actor is not None else []
    return situations.calls[key]


def holds(
    situations: Situations, situation: str, flavour: str, first: str, second: str
) -> list[int]:
    """Return the numbers of calls after which it matters to hold `first` while `second` runs."""
    one, two = ITEMS[first], ITEMS[second]
    mine = calls_alone(situations, situation, flavour, one, two)
    after = play(situations, Schedule(situation, flavour, first, second, None))
    theirs = {*after.second_calls, *calls_alone(situations, situation, flavour, two, one)}
    by_what: dict[str, list[Call]] = {}
    for call in theirs:
        by_what.setdefault(call.what, []).append(call)
        if call.kind == "name":
            by_what.setdefault(call.what.rpartition("/")[0], []).append(call)
    found = []
    for number, call in enumerate(mine):
        near = list(by_what.get(call.what, ()))
        if call.kind == "name":
            near += by_what.get(call.what.rpartition("/")[0], ())
        # What is no process, such as a lost node, may matter to any change and any question.
        is_near = any(call.conflicts(other) for other in near)
        if is_near or (not theirs and call.kind in {"ask", "order", "name", "write"}):
            found.append(number)
    # After the last of them, everything of the second comes too late for the first.
    if found and found[-1] + 1 < len(mine):
        found.append(found[-1] + 1)
    return found


def flavour_of(*items: Item) -> str:
    """Return the flavour of the run's spec in which all items can do what they are for."""
    named = {item.flavour for item in items} - {"plain"}
    return "both" if len(named) > 1 else named.pop() if named else "plain"


def places(first: str, second: str) -> Iterator[tuple[str, str]]:
    """Yield the situations, and the flavour, in which both items have something to do."""
    a, b = ITEMS[first], ITEMS[second]
    for name in a.situations:
        if name in b.situations:
            yield name, flavour_of(a, b)


def schedules(
    situations: Situations,
    first: str,
    second: str,
    most: int | None = None,
    only: str | None = None,
) -> Iterator[Schedule]:
    """Yield the schedules of a pair in which `first` may be held.

    It is held before every call whose order with one of `second` can matter, or before `most` of
    them in each situation, which are drawn always alike. `only` names the one situation wanted.
    """
    for name, flavour in places(first, second):
        if only not in {None, name}:
            continue
        yield Schedule(name, flavour, first, second, None)
        if not ITEMS[first].is_process:
            continue
        numbers = holds(situations, name, flavour, first, second)
        if most is not None and len(numbers) > most:
            chance = random.Random(f"{name} {first} {second}")
            numbers = sorted(chance.sample(numbers, most))
        for number in numbers:
            yield Schedule(name, flavour, first, second, number)


def one_each(situations: Situations, first: str, second: str) -> Iterator[Schedule]:
    """Yield one schedule of a pair in each situation: who is held, and where, is drawn."""
    for name, flavour in places(first, second):
        chance = random.Random(f"{name} {first} {second}")
        pair = [first, second]
        if chance.random() < 0.5 or not ITEMS[first].is_process:
            pair.reverse()
        calls = calls_alone(situations, name, flavour, ITEMS[pair[0]], ITEMS[pair[1]])
        changes = [n for n, call in enumerate(calls) if call.kind not in {"read", "list"}]
        held_at = chance.choice(changes) if changes else None
        yield Schedule(name, flavour, pair[0], pair[1], held_at)
