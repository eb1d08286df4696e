"""Random triples of actors: a state machine that runs each of them some calls at a time."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tests.interleavings import checks
from tests.interleavings.explore import ITEMS, Item, after, before, flavour_of, wait_until_calm
from tests.interleavings.situations import MAKERS, Situations
from tests.interleavings.stage import Actor
from tests.interleavings.test_pairs import Record
from tests.interleavings.world import World, world_at

BY_SITUATION: Final = {
    name: sorted(item.name for item in ITEMS.values() if name in item.situations) for name in MAKERS
}
STEPS: Final = 10
# The actor that waits for a lock gives up after 30 s, and says so.
HELD_S: Final = 25.0
ACTORS: Final = st.integers(0, 2)


class Triple(RuleBasedStateMachine):
    """Three actors in one situation. What each of them does is real; who runs when is drawn."""

    situations: Situations
    played = 0

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._world: World | None = None
        self._items: list[Item] = []
        self._actors: dict[int, Actor | None] = {}
        self._held_s = HELD_S

    @initialize(situation=st.sampled_from(sorted(MAKERS)), data=st.data())
    def begin(self, situation: str, data: Any) -> None:
        names = st.sampled_from(BY_SITUATION[situation])
        self._items = [ITEMS[data.draw(names)] for _ in range(3)]
        recorded = self.situations.get(situation, flavour_of(*self._items))
        world = world_at(self.situations.base, 0.0, recorded)
        self._world = self._stack.enter_context(world)
        self._world.started_as = situation
        before(self._world, recorded, *self._items)
        type(self).played += 1

    @rule(which=ACTORS, changes=st.integers(0, 30))
    def run_for(self, which: int, changes: int) -> None:
        """Run an actor until it is about to change something again, sleeps or ends."""
        if (actor := self._actor(which)) is not None and not self._sleeps(actor):
            self._stage.run(actor, changes=changes)

    @rule(which=ACTORS, calls=st.integers(1, 400))
    def run_for_calls(self, which: int, calls: int) -> None:
        """Run an actor until it has made some calls, which may be reads, sleeps or ends."""
        if (actor := self._actor(which)) is not None and not self._sleeps(actor):
            self._stage.run(actor, calls)

    @rule(which=ACTORS)
    def run(self, which: int) -> None:
        """Run an actor until it sleeps or ends."""
        if (actor := self._actor(which)) is not None and not self._sleeps(actor):
            self._stage.run(actor)

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass for all that sleep; who is held stays held, but not for long."""
        stage = self._stage
        held = [actor for actor in stage.actors if actor.state in {"held", "ready"}]
        if any(actor.state == "held" for actor in held):
            seconds = min(seconds, self._held_s)
            self._held_s -= seconds
        limit = stage.now + seconds
        for actor in held:
            actor.wake_at = limit + 1.0
        while stage.tick(limit):
            assert self._world is not None
            self._world.watch()
        for actor in held:
            if actor.state in {"held", "ready"}:
                actor.wake_at = stage.now

    def teardown(self) -> None:
        with self._stack:
            if self._world is None:
                return
            for which in range(3):
                if (actor := self._actor(which)) is not None and not self._sleeps(actor):
                    self._stage.run(actor)
            after(self._world)
            wait_until_calm(self._world)
            found = checks.problems(self._world) + checks.late_attempts(self._world)
            assert not found, "\n".join([*found, "", *self._stage.trace])

    @property
    def _stage(self) -> Any:
        assert self._world is not None
        return self._world.stage

    def _actor(self, which: int) -> Actor | None:
        """Return an actor, which starts now if it has not; None for what is no process."""
        assert self._world is not None
        if which not in self._actors:
            started = self._items[which].start(self._world)
            self._actors[which] = started if isinstance(started, Actor) else None
        return self._actors[which]

    def _sleeps(self, actor: Actor) -> bool:
        return actor.has_ended or (actor.state == "asleep" and actor.wake_at > self._stage.now)


def play_triples(situations: Situations, number: int, count: int, record: Record) -> None:
    began, Triple.situations, Triple.played = time.monotonic(), situations, 0
    options = settings(
        max_examples=count,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(Triple), settings=options)
    finally:
        record("interleavings", (Triple.played, time.monotonic() - began))


@pytest.mark.more
def test_random_triples(situations: Situations, record_property: Record) -> None:
    play_triples(situations, 0, 150, record_property)
    assert Triple.played >= 150


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(1, 21))
def test_many_random_triples(situations: Situations, part: int, record_property: Record) -> None:
    play_triples(situations, part, 500, record_property)
    assert Triple.played >= 500
