"""A run that leaves a closed spot partition for another one, and returns when it opens."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import PreflightError
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs import operator
from holdfast.workers.runs.preflight import check

SPOT = {"executor": "slurm", "nodes": 1, "gpus_per_node": 1, "partition": "spot"}
FALLBACKS = [{"partition": "prod", "after_min": 0.4}]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_moves_to_another_partition_and_returns(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "PartitionName=spot", "State=DOWN")
    run = LocalRun(
        tmp_path / "root",
        resources={**SPOT, "fallbacks": FALLBACKS, "return_after_min": 0.05},
        # The timeout is for the last place only, so it is shorter than the wait for the fallback.
        supervision={"poll_s": 0.5, "pending_timeout_min": 0.3},
        steps=100_000,
        sleep_s=0.05,
        grace_s=8.0,
    )
    log = logging.getLogger("holdfast.test")
    try:
        with Index() as index:
            supervisor = Supervisor(paths=run.paths, index=index, log=log, submit=submit_next)
            thread = threading.Thread(target=supervisor.run, daemon=True)
            thread.start()
            second = wait_until(lambda: run.paths.list_attempts()[1:], "the fallback")[0]
            left = run.wait_for_step(second, 5)
            assert slurm.run("squeue", "-h", "-o", "%P").split() == ["prod"]
            slurm.run("scontrol", "update", "PartitionName=spot", "State=UP")
            third = wait_until(lambda: run.paths.list_attempts()[2:], "the return", 120)[0]
            run.wait_for_step(third, left)
            assert slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%P").split() == ["spot"]
            operator.request(run.paths, "stop", by="tester")
            thread.join(90)
            assert not thread.is_alive()
    finally:
        slurm.run("scontrol", "update", "PartitionName=spot", "State=UP")
        run.end_all()
    history = run.history()
    assert history.state is RunState.CANCELLED
    waited, away, back = history.attempts
    places = [one.request.place for one in history.attempts if one.request]
    assert places == [0, 1, 0]
    assert (waited.state, waited.started_at) == (AttemptState.CANCELLED, None)
    assert (away.cause, away.facts["committed_step"]) == (Cause.OPERATOR, away.last_step)
    assert back.first_step == (away.last_step or 0) + 1, "nothing was trained twice"
    for before, after in ((waited, away), (away, back)):
        assert (before.ended_at or 0) <= (after.submitted_at or 0), "never two allocations"
    asked = [one for one in history.events if one.kind is EventKind.OPERATOR_REQUEST][:2]
    assert [(one.data["by"], one.data["place"]) for one in asked] == [
        ("resources.fallbacks", 1),
        ("resources.fallbacks", 0),
    ]


@pytest.mark.more
def test_a_fallback_that_the_cluster_lacks_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    wrong = [{"partition": "prod"}, {"partition": "nowhere"}, {"qos": "no-such-qos"}]
    run = LocalRun(tmp_path / "root", resources={**SPOT, "fallbacks": wrong})
    with pytest.raises(PreflightError) as refused:
        check(run.spec, tmp_path / "root")
    problems = "\n".join(refused.value.problems)
    assert "fallback 2 of resources.fallbacks: resources.partition 'nowhere'" in problems
    assert "fallback 3 of resources.fallbacks: resources.qos 'no-such-qos'" in problems
    assert "fallback 1" not in problems
