"""Five evaluations as Slurm jobs: one is preempted, one fails, and one's checkpoint is unwanted."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import MANIFEST
from holdfast.contracts.records.consumers import ConsumerState, Use, uses_in
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.reported import reported_metrics
from holdfast.workers.checkpoints import deletion
from holdfast.workers.checkpoints.consumers import Consumers
from holdfast.workers.decisions import consumers as decisions

STEPS = (10, 20, 30, 40, 50)
WAIT_S = 400.0
EVALUATION = """
import json, os, sys, time
step = int(os.environ["HOLDFAST_CHECKPOINT_STEP"])
assert os.environ["SLURM_JOB_NAME"].rpartition("-")[2].startswith("c0")
if step == 20:
    sys.exit(7)
open(f"working-{step}", "a").write("x")
while step == 10 and not os.path.exists("go"):
    time.sleep(0.1)
json.dump({"accuracy": step / 100}, open(os.environ["HOLDFAST_METRICS_FILE"], "w"))
"""


def name_of(step: int) -> str:
    return f"step-{step:08d}.a0001.l01"


class World:
    """A run whose checkpoints are there, and its consumers."""

    def __init__(self, folder: Path) -> None:
        job = {"gpus": 1, "partition": "spot"}
        command = [sys.executable, "-c", EVALUATION]
        table = {
            "on": [{"name": "eval", "command": command, "retries": 1, "job": job}],
            "resources": {"executor": "slurm", "gpus_per_node": 1},
            "checkpoint": {"keep": {"last": 1}},
            "launch": {"working_directory": str(folder)},
        }
        self.run = RunFolder(folder / "root", "kelp", "a" * 32, table, created_at=time.time())
        self.run.submit(1, 2, T0)
        self.run.claim(1, T0)
        self.paths, self.folder = self.run.paths, folder
        for step in STEPS:
            self.run.commit(step, 1, at=T0 + step)
        self.supervisor = Consumers(self.paths)
        self.journal = JournalWriter(self.paths.journal_of("flow"))

    def tend(self) -> dict[int, Use]:
        self.supervisor.tend(load_history(self.paths), self.journal)
        found = uses_in(load_history(self.paths).events)
        return {one.step: one for one in found.values()}

    def prune(self) -> set[str]:
        return {one.name for one in deletion.apply(self.paths, by="keep rules")}

    def until_states(self, **wanted: ConsumerState) -> dict[int, Use]:
        ends_at = time.monotonic() + WAIT_S
        while True:
            uses = self.tend()
            if all(uses[int(step[1:])].state is state for step, state in wanted.items()):
                return uses
            assert time.monotonic() < ends_at, uses
            time.sleep(1.0)


@pytest.mark.more
def test_five_evaluations_as_jobs(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "RETRY_S", 1.0)
    world = World(tmp_path)
    done, given_up = ConsumerState.DONE, ConsumerState.GIVEN_UP
    world.tend()
    assert world.prune() == set(), "every checkpoint but the newest is needed by a consumer"
    world.until_states(s20=given_up, s30=done, s40=done, s50=done)
    assert world.prune() == {name_of(20), name_of(30), name_of(40)}
    ends_at = time.monotonic() + WAIT_S
    while not (tmp_path / "working-10").exists():
        assert time.monotonic() < ends_at
        world.tend()
        time.sleep(0.5)
    # A job of higher priority takes every node. A new supervisor sees the end of the evaluation.
    before = world.tend()[10].start
    options = ["--partition=prod", "--nodes=4", "--exclusive", "--output=/dev/null", "--chdir=/"]
    slurm.run("sbatch", *options, "--wrap=srun sleep 3")
    world.supervisor = Consumers(world.paths)
    ends_at = time.monotonic() + WAIT_S
    while world.tend()[10].start == before:
        assert time.monotonic() < ends_at
        time.sleep(0.5)
    assert (world.paths.checkpoint(name_of(10)) / MANIFEST).exists()
    (tmp_path / "go").touch()
    uses = world.until_states(s10=done)
    assert (uses[20].tries, uses[20].reason) == (2, "it ended with exit status 7")
    assert [uses[step].tries for step in STEPS] == [1, 2, 1, 1, 1], "a preemption is not a try"
    found = reported_metrics(load_history(world.paths).events)
    assert found == {name_of(step): {"accuracy": step / 100} for step in (10, 30, 40, 50)}
    events = load_history(world.paths).events
    starts = [one.data["start"] for one in events if one.data.get("state") == "started"]
    assert sorted(starts) == list(range(1, 8)), "each start has a number of its own"
    assert [one.number for one in world.paths.list_attempts()] == [1], "no job became an attempt"
    assert EventKind.METRIC in {one.kind for one in events}
    assert world.prune() == {name_of(10)}
