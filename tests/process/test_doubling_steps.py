"""A run that saves after the steps 1, 2, 4, 8 and so on, and keeps these checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun
from tests.support.forked import RANK_FORKS

from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.checkpoints import deletion

PROGRAM = """
import torch
import torch.distributed as dist
from holdfast.trainer import Session

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Session(model, optimizer, seed=1) as session:
    for step in session.steps(20):
        session.batch(64, 4)
        model(torch.ones(1, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.more
def test_a_run_saves_and_keeps_the_doublings_of_a_step(tmp_path: Path, index: Index) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    spec = RunSpec(
        name="doubled",
        command=("train.py",),
        launch={"working_directory": str(tmp_path)},
        environment={"PYTHONPATH": str(RANK_FORKS)},
        resources={"gpus_per_node": 2},
        supervision={"heartbeat_s": 0.2, "backoff_s": 0, "standby_after_s": "off"},
        checkpoint={
            "interval": 6,
            "snapshots": "off",
            "doubling_steps": 1,
            "keep": {"last": 1, "doubling_steps": 1},
        },
    )
    run = LocalRun(tmp_path / "root", spec=spec)
    log = logging.getLogger("holdfast.test")
    try:
        history = Supervisor(paths=run.paths, index=index, log=log, submit=submit_next).run()
    finally:
        run.end_all()
    assert history.state is RunState.COMPLETED
    deletion.apply(run.paths, by="keep rules")
    # Steps follow each other faster than storage writes, and no doubling is left out. The saves of
    # the interval, such as that of step 12, are not kept.
    kept = [name.step for name in run.paths.list_checkpoint_names()]
    assert kept == [1, 2, 4, 8, 16, 20]
