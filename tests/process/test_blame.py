"""A checkpoint that crashes every launch which resumes from it, under a real supervisor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun
from tests.support.forked import RANK_FORKS

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import Cause, RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.lineage.queries import pages, run_queries
from holdfast.workers.decisions.blame import HUNG_IN_LOAD

pytestmark = pytest.mark.more

LOG = logging.getLogger("holdfast.test")
STEPS = 40
POISONED = 20
# The state of step 20 is bad once, as after an error of a device. Each later step notices it.
PROGRAM = f"""
import os, torch, torch.distributed as dist
from holdfast.trainer import Session

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model.register_buffer("scale", torch.ones(()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = Session(model, optimizer)
for step in session.steps({STEPS}):
    if model.scale <= 0:
        raise ValueError(f"the scale is {{float(model.scale)}}")
    loss = (model(torch.ones(4)) * model.scale).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == {POISONED} and os.environ["HOLDFAST_ATTEMPT"] == "1":
        model.scale.zero_()
session.close()
dist.destroy_process_group()
"""

# The state of an object at step 20 is one that its library cannot load: it aborts, or one of the
# ranks never returns from it.
FRAGILE = f"""
import os, signal, sys, torch, torch.distributed as dist
from holdfast.trainer import Session

class Fragile:
    step = 0

    def state_dict(self):
        return {{"step": self.step}}

    def load_state_dict(self, state):
        if state["step"] == {POISONED}:
            fail_to_load()

def fail_to_load():
    if sys.argv[1:] != ["hang"]:
        os.abort()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

dist.init_process_group("gloo")
torch.manual_seed(0)
model, fragile = torch.nn.Linear(4, 2), Fragile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = Session(model, optimizer, extra={{"fragile": fragile}})
is_first = session.step == 0
for step in session.steps({STEPS}):
    if step == {POISONED} + 1 and is_first:
        raise SystemExit(3)
    optimizer.zero_grad()
    model(torch.ones(4)).square().sum().backward()
    optimizer.step()
    fragile.step = step if is_first else 0
session.close()
dist.destroy_process_group()
"""


def supervised(
    folder: Path,
    index: Index,
    *,
    program: str = PROGRAM,
    arguments: tuple[str, ...] = (),
    restarts_in_place: int = 3,
    budget: int = 9,
    **more: Any,
) -> tuple[RunPaths, RunState]:
    (folder / "program.py").write_text(program)
    spec = {
        "name": "kelp",
        "command": ["program.py", *arguments],
        "launch": {"working_directory": str(folder)},
        "resources": {"gpus_per_node": 1},
        "environment": {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANK_FORKS)},
        "checkpoint": {"interval": 10, "snapshots": "off"},
        "supervision": {
            "poll_s": 0.2,
            "heartbeat_s": 0.3,
            "backoff_s": 0,
            "standby_after_s": "off",
            "restarts_in_place": restarts_in_place,
            "silence_s": {"load": 4},
            "budgets": {Cause.USER_ERROR: budget, Cause.UNKNOWN: budget},
        },
        **more,
    }
    run = LocalRun(folder / "root", spec=RunSpec.model_validate(spec))
    try:
        history = Supervisor(paths=run.paths, index=index, log=LOG, submit=submit_next).run()
    finally:
        run.end_all()
    return run.paths, history.state


def of_kind(paths: RunPaths, kind: EventKind) -> list[Event]:
    return [event for event in load_events(paths) if event.kind is kind]


def resumed_steps(paths: RunPaths) -> list[int]:
    return [event.data["step"] for event in of_kind(paths, EventKind.RESUMED)]


def assert_blamed(paths: RunPaths) -> str:
    """The poisoned checkpoint was blamed once; returns its directory's name."""
    assert resumed_steps(paths) == [0, 20, 20, 20, 10]
    (blame,) = of_kind(paths, EventKind.ROLLED_BACK)
    (poisoned,) = blame.data["excluded"]
    assert poisoned.startswith("step-00000020.a0001.")
    assert blame.data["to"].startswith("step-00000010.a0001.")
    assert blame.data["launches"] == [[2, 1], [3, 1], [4, 1]]
    assert blame.data["crash"].startswith("ValueError: the scale is #.# at ")
    return str(poisoned)


def test_after_three_crashes_from_a_checkpoint_the_one_before_it_is_resumed(
    tmp_path: Path, index: Index
) -> None:
    keep = {"interval": 10, "snapshots": "off", "keep": {"last": 2}}
    paths, state = supervised(tmp_path, index, checkpoint=keep)
    assert state is RunState.COMPLETED
    poisoned = assert_blamed(paths)
    engine = index.open()
    listed = pages.list_checkpoints(engine, str(paths.directory), newest_first=False).items
    marked = {Path(one["path"]).name: one["state"] for one in listed if one["rolled_back"]}
    assert marked == {poisoned: "committed"}, "it must be marked, and kept in spite of `keep`"
    edges = run_queries.lineage_graph(engine, str(paths.directory))["edges"]
    assert [edge["kind"] for edge in edges].count("rolled_back") == 1
    # The launch after the blame is a restart in place, which `user_error` does not allow otherwise.
    assert len(paths.list_attempts()) == 4


def test_a_relaunch_follows_a_blame_although_the_budget_is_used_up(
    tmp_path: Path, index: Index
) -> None:
    paths, state = supervised(tmp_path, index, restarts_in_place=0, budget=3)
    assert state is RunState.COMPLETED
    poisoned = assert_blamed(paths)
    assert len(paths.list_attempts()) == 5
    decisions = [event.data["reason"] for event in of_kind(paths, EventKind.DECISION)]
    assert sum(f"{poisoned} is blamed" in reason for reason in decisions) == 1


def test_a_checkpoint_that_cannot_be_loaded_is_blamed(tmp_path: Path, index: Index) -> None:
    paths, state = supervised(tmp_path, index, program=FRAGILE)
    assert state is RunState.COMPLETED
    assert resumed_steps(paths) == [0, 10], "no launch has resumed from step 20"
    loaded = [event.data["step"] for event in of_kind(paths, EventKind.LOADING)]
    assert loaded == [20, 20, 20, 10]
    (blame,) = of_kind(paths, EventKind.ROLLED_BACK)
    assert blame.data["to"].startswith("step-00000010.a0001.")
    assert len(blame.data["launches"]) == 3
    assert blame.data["crash"] == "SIGABRT while it loaded"
    assert "ended in the same way while they loaded it" in blame.data["reason"]


def test_a_checkpoint_in_whose_load_a_rank_stops_is_blamed(tmp_path: Path, index: Index) -> None:
    paths, state = supervised(
        tmp_path, index, program=FRAGILE, arguments=("hang",), resources={"gpus_per_node": 2}
    )
    assert state is RunState.COMPLETED
    assert resumed_steps(paths) == [0, 10], "no launch has resumed from step 20"
    confirmed = of_kind(paths, EventKind.HANG_CONFIRMED)
    assert len(confirmed) == 3
    for event in confirmed:
        phases = {one["rank"]: one["phase"] for one in event.data["silent"]}
        assert phases[1] == "load", "the rank that stopped is named with its phase"
        assert "rank 1 at fail_to_load" in event.data["finding"]
    (blame,) = of_kind(paths, EventKind.ROLLED_BACK)
    assert blame.data["to"].startswith("step-00000010.a0001.")
    assert blame.data["crash"] == HUNG_IN_LOAD
    assert len(blame.data["launches"]) == 3
