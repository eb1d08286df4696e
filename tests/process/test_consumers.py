"""A run with consumers, supervised from its start to the end of its last consumer."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun
from tests.support.forked import RANK_FORKS

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.checkpoint_choice import choose_checkpoint
from holdfast.contracts.records.consumers import ConsumerState, uses_in
from holdfast.contracts.records.documents import Claim, read_document
from holdfast.contracts.records.reported import reported_metrics
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.lineage.queries import run_queries

STARTS_S_MAX = 60.0
PROGRAM = """
import time, torch
import torch.distributed as dist
from holdfast.trainer import Session

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Session(model, optimizer, seed=1) as session:
    for step in session.steps(40):
        session.batch(64, 4)
        model(torch.ones(1, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
"""
# The checkpoint of step 20 is the best one. No rule but `best` keeps it.
EVALUATION = """
import json, os
step = int(os.environ["HOLDFAST_CHECKPOINT_STEP"])
json.dump({"distance": abs(step - 20)}, open(os.environ["HOLDFAST_METRICS_FILE"], "w"))
"""
KEY = "TESTS_CONSUMER_KEY"
# An evaluation at the end reads a dataset with the run's token, as the program did.
WEIGHTS = f"""
import os, torch
assert os.environ["{KEY}"] == "a value"
torch.load(os.environ["HOLDFAST_CHECKPOINT_PATH"], weights_only=True)
"""


@pytest.mark.more
def test_evaluations_choose_the_best_checkpoint_of_a_run(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "a value")
    (tmp_path / "train.py").write_text(PROGRAM)
    evaluation, weights = ([sys.executable, "-c", one] for one in (EVALUATION, WEIGHTS))
    spec = RunSpec(
        name="tried",
        command=("train.py",),
        launch={"working_directory": str(tmp_path)},
        environment={"PYTHONPATH": str(RANK_FORKS), KEY: {"from_env": KEY}},
        supervision={"heartbeat_s": 0.2, "backoff_s": 0, "standby_after_s": "off"},
        checkpoint={
            "interval": 10,
            "snapshots": "off",
            "keep": {"last": 1, "best": {"metric": "distance"}},
        },
        on=(
            {"name": "eval", "command": evaluation},
            {"name": "weights", "command": weights, "event": "end", "export": "torch"},
            # It works until after the run's end, and keeps a checkpoint that no rule keeps.
            {"name": "late", "command": ["sleep", "8"], "every_steps": 30},
            {"name": "broken", "command": ["/nonexistent"], "every_steps": 40, "retries": 0},
        ),
    )
    run = LocalRun(tmp_path / "root", spec=spec)
    log = logging.getLogger("holdfast.test")
    try:
        history = Supervisor(paths=run.paths, index=index, log=log, submit=submit_next).run()
    finally:
        run.end_all()
    assert history.state is RunState.COMPLETED
    uses = {
        (one.consumer, one.step): one.state
        for one in uses_in(history.lines.of_kinds(EventKind.CONSUMER)).values()
    }
    evaluated = {("eval", step): ConsumerState.DONE for step in (10, 20, 30, 40)}
    last = {("weights", 40): ConsumerState.DONE, ("broken", 40): ConsumerState.GIVEN_UP}
    assert uses == {**evaluated, **last, ("late", 30): ConsumerState.DONE}
    assert [one.step for one in run.paths.list_checkpoint_names()] == [20, 40]
    assert len(history.attempts) == 1
    found = {name: one["distance"] for name, one in reported_metrics(history.events).items()}
    assert sorted(found.values()) == [0, 10, 10, 20]
    assert choose_checkpoint(run.paths, "best").startswith("step-00000020.")
    shown = run_queries.show_run(index.open(), str(run.paths.directory))["consumers"]
    assert {(one["name"], one["step"]): one["state"] for one in shown} == uses
    assert all(
        one["log"] and Path(one["log"]).is_file() for one in shown if one["name"] != "broken"
    )
    graph = run_queries.lineage_graph(index.open(), str(run.paths.directory))
    consumed = [one["from"] for one in graph["edges"] if one["kind"] == "consumed_by"]
    assert len(consumed) == len(uses)
    assert not list(run.paths.consumers.rglob("export*")), "the export was not deleted"
    assert not run.paths.private.exists(), "the values of secrets were not deleted"
    committed = {one.data["checkpoint"]: one.time for one in run.events(EventKind.COMMITTED)}
    waits = {
        start.data["checkpoint"]: claim.claimed_at - committed[start.data["checkpoint"]]
        for start in run.events(EventKind.CONSUMER)
        if start.data["state"] == "started"
        and start.data["consumer"] == "eval"
        and (claim := read_document(Claim, run.paths.consumer(start.data["start"]).claim))
    }
    print("seconds from the commit to the consumer:", sorted(waits.values()))
    assert max(waits.values()) < STARTS_S_MAX
