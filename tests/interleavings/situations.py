"""The situations from which schedules start, each made by the real code on a stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.interleavings.agents import commit
from tests.interleavings.stage import Actor, Call
from tests.interleavings.world import Situation, World, world_at

from holdfast.contracts.states import RunState
from holdfast.workers.agent.context import load_context

# Whole seconds, because Slurm prints no others.
START: Final = 1_790_000_000.0


def _wait_for(world: World, state: RunState, jobs: int | None = None) -> None:
    def is_there() -> bool:
        return world.history().state is state and (jobs is None or len(world.trainers) == jobs)

    assert world.wait_until_calm(is_there, 300.0), f"{world.history().state}:\n{world.stage.tail()}"


def _fresh(world: World) -> None:
    """Nobody has begun to supervise the run."""


def _queued(world: World) -> None:
    """Attempt 1 waits for GPUs that others hold."""
    for node in world.cluster.nodes.values():
        node.taken = node.gpus if node.partition == "main" else 0
    supervisor = world.start_supervisor()
    world.stage.run(supervisor)
    world.stage.end(supervisor)


def _running(world: World) -> None:
    """Attempt 1 trains and has committed two checkpoints. Half of the cluster is free."""
    names = ("n3", "n4") if world.flavour != "whole" else ()
    beyond = [world.cluster.nodes[name] for name in names]
    for node in beyond:
        # Otherwise a run that may grow would do so now.
        node.taken = node.gpus
    supervisor = world.start_supervisor()
    _wait_for(world, RunState.RUNNING, 1)
    world.stage.end(supervisor)
    agent, _ = next(iter(world.agents.values()))
    assert agent.job.request is not None
    context = load_context(agent.job.request, {"SLURM_JOB_ID": agent.job.id})
    for step in (2, 4):
        commit(context, step)
    agent.step = 5
    for node in beyond:
        node.taken = 0


def _ends(world: World, how: str) -> None:
    _running(world)
    agent, actor = next(iter(world.agents.values()))
    agent.ends = how
    limit = world.stage.now + 60.0
    while not actor.has_ended:
        assert world.stage.tick(limit), world.stage.tail()
    assert actor.error is None, actor.error


def _crashed(world: World) -> None:
    """The agent of attempt 1 has ended by a killed rank, which nobody has noticed yet."""
    _ends(world, "crash")


def _failing(world: World) -> None:
    """The program of attempt 1 has failed, which nobody has noticed yet."""
    _ends(world, "user_error")


def _failed(world: World) -> None:
    """The run has failed, and its supervisor has left."""
    _failing(world)
    supervisor = world.start_supervisor()
    _wait_for(world, RunState.FAILED)
    assert supervisor.has_ended, world.stage.tail()


def _order(world: World, action: str) -> Actor:
    actor = world.order(action)  # type: ignore[arg-type]
    world.stage.run(actor)
    assert actor.error is None, actor.error
    assert actor.has_ended
    return actor


def _pausing(world: World) -> None:
    """Somebody has paused the run, and its attempt has not ended yet."""
    _running(world)
    _order(world, "pause")


def _paused(world: World) -> None:
    """The run is paused, and its attempt has ended."""
    _running(world)
    supervisor = world.start_supervisor()
    _order(world, "pause")
    _wait_for(world, RunState.PAUSED)
    world.stage.end(supervisor)


def _unanswered(world: World) -> None:
    """Slurm has accepted attempt 1, and its answer has not arrived."""
    world.cluster.loses_answer = True
    supervisor = world.start_supervisor()
    limit = world.stage.now + 30.0
    while world.stage.tick(limit) and not (world.cluster.jobs and supervisor.state == "asleep"):
        pass
    world.stage.end(supervisor)


MAKERS: Final[dict[str, Callable[[World], None]]] = {
    "fresh": _fresh,
    "queued": _queued,
    "running": _running,
    "crashed": _crashed,
    "failing": _failing,
    "failed": _failed,
    "pausing": _pausing,
    "paused": _paused,
    "unanswered": _unanswered,
}


def _unfollowed(world: World) -> None:
    """Attempt 1 trains, and nobody has submitted its successor yet."""
    supervisor = world.start_supervisor()
    limit = world.stage.now + 60.0
    while not world.cluster.jobs or supervisor.state != "asleep":
        assert world.stage.tick(limit), world.stage.tail()
    world.stage.end(supervisor)
    _wait_for(world, RunState.RUNNING, 1)


def _expediting(world: World) -> None:
    """The leading node of attempt 1 is lost, and Slurm restarts the job. Nobody has noticed."""
    _running(world)
    for job in world.live_jobs:
        world.cluster.lose_node(job)


# Situations of a run whose spec has `resources.standby`.
OF_STANDBY: Final[dict[str, Callable[[World], None]]] = {
    "unfollowed": _unfollowed,
    "expediting": _expediting,
}


class Situations:
    """Makes each situation once, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[str, str], Situation] = {}
        # What each actor does by itself in each situation, see `explore.calls_alone`.
        self.calls: dict[tuple[object, ...], list[Call]] = {}

    @property
    def base(self) -> Path:
        """The folder in which every world is played: a run's documents contain its path."""
        return self.folder / "world"

    def get(self, name: str, flavour: str = "plain") -> Situation:
        key = name, flavour
        if key not in self._known:
            with world_at(self.base, START) as world:
                world.create(flavour)
                {**MAKERS, **OF_STANDBY}[name](world)
                # Slurm's answers from before are forgotten, as after a minute.
                shutil.rmtree(world.home)
                folder = self.folder / f"{name}-{flavour}"
                self._known[key] = world.record(name, flavour, folder)
        return self._known[key]
