"""Metrics that a spec or a program names and never logs: reported, and nothing is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.alerts import noticed
from holdfast.contracts.records.history import load_history
from holdfast.workers.checkpoints import deletion

PROGRAM = """
import json, os, sys, torch
import torch.distributed as dist
from holdfast.trainer import Session

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
evaluates_from = 25 if os.environ["HOLDFAST_ATTEMPT"] == "2" else 1000
with Session(model, optimizer, seed=1, best=("acc", "max")) as session:
    for step in session.steps(20 * int(os.environ["HOLDFAST_ATTEMPT"])):
        session.batch(64, 4)
        loss = model(torch.ones(1, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss.item())
        session.log(acc=step / 100)
        if step >= evaluates_from and step % 5 == 0:
            session.log(val_loss=1 / step)
"""


@pytest.mark.more
def test_a_metric_that_is_not_logged_is_reported_and_deletes_nothing(tmp_path: Path) -> None:
    program = tmp_path / "names.py"
    program.write_text(PROGRAM)
    run = LocalRun(
        tmp_path / "root",
        gpus=1,
        program=program,
        checkpoint={
            "interval": 5,
            "snapshots": "off",
            "keep": {"last": 1, "best": {"metric": "val_loss"}},
        },
        supervision={"numerics": {"metric": "los"}},
    )
    run.submit()
    run.wait_for_end()
    missing = {one.data["key"]: one.data for one in run.events(EventKind.METRIC_MISSING)}
    assert {key: (one["metric"], one["missing"]) for key, one in missing.items()} == {
        "checkpoint.keep.best": ("val_loss", True),
        "supervision.numerics.metric": ("los", True),
    }
    assert "which rank 0 has not logged yet" in missing["supervision.numerics.metric"]["text"]
    assert "did you mean loss?" in missing["supervision.numerics.metric"]["text"]
    assert "no checkpoint is deleted" in missing["checkpoint.keep.best"]["text"]
    logs = [path.read_bytes() for path in run.paths.attempt(1).logs.rglob("*") if path.is_file()]
    assert missing["checkpoint.keep.best"]["text"].encode() in b"".join(logs)
    shown = [one["text"] for one in noticed(load_history(run.paths).events)]
    assert {one["text"] for one in missing.values()} <= {*shown}
    before = run.paths.list_checkpoints()
    assert len(before) > 1
    assert deletion.apply(run.paths, by="keep rules", writer="flow") == []
    assert run.paths.list_checkpoints() == before

    # The second attempt evaluates: the rules then apply to all checkpoints.
    run.submit()
    run.wait_for_end()
    seen = [(one.data["key"], one.data["missing"]) for one in run.events(EventKind.METRIC_MISSING)]
    assert seen.count(("checkpoint.keep.best", False)) == 1
    deleted = {one.name for one in deletion.apply(run.paths, by="keep rules", writer="flow")}
    assert {path.name for path in before} <= deleted
    assert [path.name[5:13] for path in run.paths.list_checkpoints()] == ["00000040"]
