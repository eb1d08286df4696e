"""The ranks of two nodes are killed when only one node has the newest step in memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, processes_of, wait_until
from tests.support.agent_ranks import (
    filling_of,
    hold_in_copy,
    ranks_of,
    send_all,
    slots_of,
    steps_in,
    wait_for_commit,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState
from holdfast.trainer.slots.slots import SlotState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

STEPS = 40
PADDING = 8 << 20


@pytest.fixture
def run(slurm: SlurmCluster, tmp_path: Path) -> Iterator[LocalRun]:
    made = LocalRun(
        tmp_path / "root",
        resources={"executor": "slurm", "nodes": 2, "gpus_per_node": 1, "partition": "spot"},
        checkpoint={"interval": 1000, "snapshots": 1},
        steps=STEPS,
        sleep_s=0.1,
        padding=PADDING,
    )
    yield made
    made.end_all()
    wait_until(lambda: not processes_of(made.paths), "the end of all", 60)


def test_newest_step_in_memory_on_both_nodes_is_committed(run: LocalRun) -> None:
    attempt = run.submit()
    ranks = ranks_of(run, attempt, 1)
    agents = {beat.node: beat.agent_pid for beat in run.beats(attempt)}
    with ExitStack() as held:
        slots = {node: held.enter_context(slots_of(pid)) for node, pid in agents.items()}
        # Node 1's rank is stopped in its copy; node 0's finishes the same step and waits.
        copied = hold_in_copy(ranks[1], slots[1])
        wait_until(lambda: copied in steps_in(slots[0], SlotState.SNAPSHOT), "node 0's copy")
        assert steps_in(slots[1], SlotState.SNAPSHOT) == [copied - 1]
        send_all(ranks[0] + ranks[1], signal.SIGKILL)
    kept = wait_for_commit(run, lambda manifest: manifest.reason == "crash")
    assert kept.step == copied - 1
    assert filling_of(run, kept) == {float(copied - 1)}
    view = run.wait_for_end()
    assert (view.state, view.last_step) == (AttemptState.COMPLETED, STEPS)
    first, second = run.outcome(attempt).launches
    assert (first.ending, second.ending) == ("crashed", "completed")
    assert second.first_step == copied, "exactly one step must be trained again"
    told = [e.data for e in run.events(EventKind.COMMITTED) if e.data.get("reason") == "crash"]
    assert [one["checkpoint"] for one in told] == [kept.name], "the commit must be recorded once"
