"""Health checks on a real Slurm cluster: the unhealthy node is excluded, and the others train."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, processes_of, wait_until

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.policy import decide


@pytest.mark.more
def test_an_unhealthy_node_is_excluded_and_the_run_completes_on_others(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The node that is node 1 of the first attempt fails its check from then on."""
    marker = tmp_path / "bad"
    check = (
        f'[ "$SLURM_PROCID" = 1 ] && [ ! -e {marker} ] && echo "$SLURMD_NODENAME" > {marker}; '
        f'! grep -x "$SLURMD_NODENAME" {marker} 2>/dev/null'
    )
    resources = {"executor": "slurm", "nodes": 2, "gpus_per_node": 1, "partition": "spot"}
    run = LocalRun(
        tmp_path / "root", resources=resources, steps=12, health={"before": [check]}, grace_s=8.0
    )
    try:
        run.submit()
        view = run.wait_for_end()
        bad = marker.read_text().strip()
        assert (view.state, view.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
        assert view.facts["unhealthy_hosts"] == [bad]
        assert run.events(EventKind.LAUNCH_STARTED) == []
        decision = decide(run.history(), None, now=time.time())
        assert (decision.action, decision.exclude) == ("relaunch", (bad,))
        again = run.submit(exclude=decision.exclude)
        view = run.wait_for_end()
        assert (view.state, view.cause) == (AttemptState.COMPLETED, None), view.evidence
        assert bad not in run.outcome(again).hosts
    finally:
        run.end_all()
    wait_until(lambda: not processes_of(run.paths), "the end of all", 60)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pairs_of_nodes_find_the_node_whose_network_fails(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The node that is node 2 of the first attempt has a wrong network interface from then on."""
    marker = tmp_path / "bad"
    setup = [
        f'[ "$SLURM_PROCID" != 2 ] || [ -e {marker} ] || echo "$SLURMD_NODENAME" > {marker}',
        f'! grep -qx "$SLURMD_NODENAME" {marker} 2>/dev/null || export GLOO_SOCKET_IFNAME=nosuch0',
    ]
    run = LocalRun(
        tmp_path / "root",
        resources={"executor": "slurm", "nodes": 4, "gpus_per_node": 1, "partition": "spot"},
        elastic={"min_gpus": 2, "max_gpus": 4},
        launch={"node_setup": setup},
        health={"before": ["allreduce"], "timeout_s": 50},
        steps=12,
        grace_s=8.0,
    )
    try:
        run.submit()
        view = run.wait_for_end()
        bad = marker.read_text().strip()
        assert (view.state, view.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
        assert view.facts["unhealthy_hosts"] == [bad], view.evidence
        assert run.events(EventKind.LAUNCH_STARTED) == []
        again = run.submit(gpus=2, exclude=(bad,))
        view = run.wait_for_end()
        assert (view.state, view.world_size) == (AttemptState.COMPLETED, 2), view.evidence
        assert bad not in run.outcome(again).hosts
    finally:
        run.end_all()
    wait_until(lambda: not processes_of(run.paths), "the end of all", 60)
