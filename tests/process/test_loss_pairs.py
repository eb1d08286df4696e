"""A node is lost in a run with a stream, after a rollback, or while a consumer of it works."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.process import stream_program
from tests.process.local_runs import LocalRun, wait_until
from tests.process.stream_program import EPOCHS
from tests.process.test_drained_nodes import PlayedController
from tests.process.test_lost_nodes import events, launches, ranks_of
from tests.process.test_numerics import (
    BAD_STEP,
    GOOD_STEP,
    INTERVAL,
    MARGIN,
    ORDER,
    SKIPPED,
    STEPS,
    WINDOW,
    ids_of,
)
from tests.process.test_numerics import PROGRAM as POISONED
from tests.process.test_streams import IDS, StreamRun
from tests.support.agent_ranks import committed
from tests.support.forked import RANK_FORKS
from tests.support.played_nodes import PlayedJob

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.records.consumers import ConsumerState, Use, uses_in
from holdfast.contracts.records.history import excluded_checkpoints
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.trainer.data.order import SkipWindow

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

EVERY = 3


@pytest.mark.parametrize("lost", [0, 1], ids=["lead", "other"])
def test_a_stream_gives_the_same_samples_after_a_loss(tmp_path: Path, lost: int) -> None:
    for name in ("whole", "job", "played"):
        (tmp_path / name).mkdir()
    whole, stream = (StreamRun(tmp_path / name, "lines", 0) for name in ("whole", "job"))
    whole.launch(2)
    stream.directory.mkdir()
    settings = {**stream.settings, "sleep_s": 0.3, "hurry": str(tmp_path / "hurry")}
    given: dict[str, Any] = {
        "program": Path(stream_program.__file__),
        "checkpoint": {"interval": EVERY, "snapshots": "off"},
    }
    with PlayedJob(tmp_path / "played", nodes=2, spares=1, **given, **settings) as job:
        job.run.wait_for_step(job.attempt, 2 * EVERY + 2)
        job.kill_node(lost)
        (tmp_path / "hurry").touch()
        assert [job.wait(node) for node in range(3) if node != lost] == [0, 0]
        outcome = job.run.outcome(job.attempt)
    assert outcome.state is AttemptState.COMPLETED
    assert launches(job)[1]["way"] == "spare"
    first, second = outcome.launches
    assert second.first_step is not None
    assert EVERY < second.first_step <= (first.last_step or 0) + 1
    assert second.first_step % EVERY == 1, "it continues from a commit"
    assert stream.samples() == whole.samples()
    for epoch in range(EPOCHS):
        assert stream.counts(epoch) == Counter(IDS), "a sample was lost or repeated"


def test_a_loss_after_a_rollback_does_not_return_to_the_bad_branch(tmp_path: Path) -> None:
    numerics = {"on_nan": "rollback", "skip_steps": SKIPPED, "margin_steps": MARGIN}
    hurry = tmp_path / "hurry"
    poison = [int(ORDER.rank_ids(BAD_STEP, 1, 2)[0])]
    settings: dict[str, Any] = {
        "program": POISONED,
        "checkpoint": {"interval": INTERVAL, "snapshots": "off"},
        "supervision": {"numerics": numerics},
        "steps": STEPS,
        "sleep_s": 0.2,
        "poison": poison,
        "window": WINDOW,
        "hurry": str(hurry),
    }
    with PlayedJob(tmp_path, nodes=2, spares=1, **settings) as job:
        wait_until(lambda: events(job, EventKind.ROLLED_BACK), "the rollback")
        wait_until(lambda: ranks_of(job, 2), "the launch after it")
        job.kill_node(1)
        hurry.touch()
        assert (job.wait(0), job.wait(2)) == (0, 0)
        outcome = job.run.outcome(job.attempt)
    assert (outcome.state, outcome.last_step) == (AttemptState.COMPLETED, STEPS)
    assert [one["lost"] for one in launches(job)[2:]] == [["n1"]]
    excluded = excluded_checkpoints(job.run.history().events)
    assert excluded, "the bad branch has a checkpoint"
    assert not {one.resumed_from for one in outcome.launches} & excluded
    assert outcome.launches[1].first_step == GOOD_STEP + 1
    skipping = replace(ORDER, skips=(SkipWindow(*WINDOW),))
    assert ids_of(job.run) == {
        (rank, step): skipping.rank_ids(step, rank, 2).tolist()
        for rank in range(2)
        for step in range(1, STEPS + 1)
    }
    for rank in range(2):
        weights = json.loads((job.run.paths.directory / f"weights{rank}.json").read_text())
        assert weights["own"] == weights["spared"]


# It uses the checkpoint for as long as the test wants.
CONSUMER = """
import os, sys, time
from pathlib import Path
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
folder = Path(os.environ["HOLDFAST_CHECKPOINT_PATH"])
sys.exit(not (folder / "manifest.json").exists())
"""


def spec_with_consumer(folder: Path) -> RunSpec:
    program = LocalRun(folder / "given", steps=400, sleep_s=0.1, hurry=str(folder / "hurry")).spec
    consumer = [sys.executable, "-c", CONSUMER, str(folder / "gate")]
    return RunSpec(
        name="consumed",
        command=program.command,
        launch=program.launch,
        environment={"PYTHONPATH": str(RANK_FORKS)},
        resources={
            "executor": "slurm",
            "nodes": 2,
            "gpus_per_node": 1,
            "gres": "none",
            "spare_nodes": 1,
        },
        supervision={"heartbeat_s": 0.2, "backoff_s": 0, "standby_after_s": "off", "poll_s": 1.0},
        checkpoint={"interval": 10, "snapshots": "off", "keep": {"last": 1}},
        on=({"name": "eval", "command": consumer, "every_steps": 20},),
    )


def uses(run: LocalRun) -> list[Use]:
    history = run.history()
    return list(uses_in(history.lines.of_kinds(EventKind.CONSUMER)).values())


def test_a_consumer_keeps_its_checkpoint_when_a_node_of_the_run_is_lost(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(paths: RunPaths, **_: object) -> AttemptPaths:
        raise AssertionError("the attempt continues")

    spec = spec_with_consumer(tmp_path)
    with PlayedJob(tmp_path, nodes=2, spares=1, spec=spec) as job:
        PlayedController(tmp_path / "slurm", job, monkeypatch)
        log = logging.getLogger("holdfast.test")
        supervisor = Supervisor(paths=job.run.paths, index=index, log=log, submit=submit)
        thread = threading.Thread(target=supervisor.run, daemon=True)
        thread.start()
        (used,) = wait_until(lambda: uses(job.run)[:1], "the consumer")
        job.kill_node(1)
        wait_until(lambda: ranks_of(job, 2), "the ranks of the second launch")
        # The keep rules would delete the checkpoint by now.
        wait_until(lambda: max(committed(job.run)) >= used.step + 30, "later checkpoints")
        folder = job.run.paths.checkpoint(used.checkpoint)
        assert read_manifest(folder) is not None
        (tmp_path / "gate").touch()
        (tmp_path / "hurry").touch()
        assert (job.wait(0), job.wait(2)) == (0, 0)
        thread.join(120)
        assert not thread.is_alive()
    outcome = job.run.outcome(job.attempt)
    assert (outcome.state, len(outcome.launches)) == (AttemptState.COMPLETED, 2)
    assert len(job.run.history().attempts) == 1
    assert {one.state for one in uses(job.run)} == {ConsumerState.DONE}
    assert used.checkpoint in {one.checkpoint for one in uses(job.run)}
