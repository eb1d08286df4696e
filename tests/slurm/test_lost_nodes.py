"""Nodes are lost where a run uses every node: it continues, on fewer nodes or on all of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs import operator
from holdfast.workers.runs.tending import allow_hosts_again
from holdfast.workers.schedulers import slurm_client
from holdfast_bench.live_drills.kinds import KINDS, Recovery
from holdfast_bench.live_drills.runner import drill_live

ALL_NODES = {"executor": "slurm", "nodes": 4, "gpus_per_node": 1, "partition": "spot"}
# From the scheduler's report of the loss to the submission of the next attempt, which includes the
# back-off of ten seconds.
SUBMITTED_S_MAX = 30.0


@contextmanager
def supervised(run: LocalRun) -> Iterator[None]:
    """Supervise the run in a thread, and stop it at the end."""
    log = logging.getLogger("holdfast.test")
    with Index() as index:
        supervisor = Supervisor(paths=run.paths, index=index, log=log, submit=submit_next)
        thread = threading.Thread(target=supervisor.run, daemon=True)
        thread.start()
        try:
            yield
            if run.history().state.is_live:
                operator.request(run.paths, "stop", by="tester")
        finally:
            run.end_all()
            thread.join(90)
    assert not thread.is_alive()


def run_on_all(root: Path, **fields: Any) -> LocalRun:
    given = {
        "resources": ALL_NODES,
        # The default back-off after a failure counts, too.
        "supervision": {"poll_s": 1.0, "backoff_s": 10},
        "steps": 100_000,
        "sleep_s": 0.05,
        "grace_s": 8.0,
        "checkpoint": {"interval": 20},
        **fields,
    }
    return LocalRun(root, **given)


def lose_a_node(slurm: SlurmCluster, run: LocalRun, name: str) -> float:
    """Kill a node under a training run; return when Slurm reports that it is down."""
    first = wait_until(run.paths.list_attempts, "an attempt")[0]
    run.wait_for_step(first, 5)
    slurm.kill_node(name)
    wait_until(lambda: "down" in slurm.node_states()[name], "the loss", 60)
    return time.time()


@pytest.mark.more
def test_a_rigid_run_on_all_nodes_waits_for_the_lost_node(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    run = run_on_all(tmp_path / "root", elastic={"choices": [4]})
    with supervised(run):
        try:
            down_at = lose_a_node(slurm, run, "n3")
            second = wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt")[0]
            wait_until(second.submission.exists, "its submission", 60)
            took_s = time.time() - down_at
            wait_until(lambda: run.history().attempts[1].state is AttemptState.PENDING, "the queue")
        finally:
            slurm.start_node("n3")
        run.wait_for_step(second, 1)
    lost, again = run.history().attempts[:2]
    assert (lost.cause, lost.facts["lost_hosts"]) == (Cause.NODE_FAILURE, ["n3"]), lost.evidence
    assert again.request is not None
    assert (again.gpus, again.request.exclude) == (4, ())
    assert "n3 (lost) allowed again" in again.request.reason
    assert took_s <= SUBMITTED_S_MAX, f"submitted {took_s:.1f} s after the loss was known"
    assert len(run.history().attempts) == 2


@pytest.mark.more
def test_an_elastic_run_on_all_nodes_continues_on_the_others(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this, the nodes are looked at once a minute.
    monkeypatch.setattr(slurm_client, "CAPACITY_AGE_S", 1.0)
    grows = {"grow": True, "grow_after_s": 2}
    supervision = {"poll_s": 1.0, "backoff_s": 10, "restarts_in_place": 0}
    elastic = {"choices": [1, 2, 4], **grows}
    run = run_on_all(tmp_path / "root", elastic=elastic, supervision=supervision)
    with supervised(run):
        try:
            down_at = lose_a_node(slurm, run, "n3")
            second = wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt")[0]
            wait_until(second.submission.exists, "its submission", 60)
            took_s = time.time() - down_at
            run.wait_for_step(second, 1)
        finally:
            slurm.start_node("n3")
        # The node is idle again. The run must not grow onto it.
        time.sleep(8)
        run.wait_for_step(second, 1)
    history = run.history()
    assert history.state is RunState.CANCELLED
    lost, again = history.attempts
    assert (lost.cause, again.gpus) == (Cause.NODE_FAILURE, 2)
    assert again.request is not None
    assert again.request.exclude == ("n3",)
    assert "without n3 (lost)" in again.request.reason
    asked = [event.data["by"] for event in run.events(EventKind.OPERATOR_REQUEST)]
    assert asked == ["tester"], "it grew onto the node that was lost"
    assert took_s <= SUBMITTED_S_MAX, f"submitted {took_s:.1f} s after the loss was known"


def lines_of(run: LocalRun, kind: EventKind) -> list[dict[str, Any]]:
    return [event.data for event in run.events(kind)]


def changes_of(run: LocalRun) -> list[dict[str, Any]]:
    """The launches on other nodes than the one before.

    On a busy machine a rank's death may be seen before its node's. Then a launch on the same nodes
    comes in between.
    """
    return [one for one in lines_of(run, EventKind.LAUNCH_STARTED) if "way" in one]


@pytest.mark.more
@pytest.mark.timeout(400)
def test_an_attempt_continues_on_a_spare_node_and_then_on_fewer_nodes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    resources = {**ALL_NODES, "nodes": 3, "spare_nodes": 1}
    # Three ranks divide these samples, and so do two and one.
    run = run_on_all(tmp_path / "root", resources=resources, elastic={"min_gpus": 1}, batch=6)
    with supervised(run):
        try:
            first = wait_until(run.paths.list_attempts, "an attempt")[0]
            run.wait_for_step(first, 5)
            slurm.kill_node("n2")
            wait_until(lambda: len(lines_of(run, EventKind.LAUNCH_STARTED)) > 1, "a launch")
            step = run.wait_for_step(first, 1)
            run.wait_for_step(first, step + 5)
            slurm.kill_node("n3")
            wait_until(lambda: len(lines_of(run, EventKind.LAUNCH_STARTED)) > 2, "a launch")
            wait_until(lambda: "down" in slurm.node_states()["n3"], "the loss", 60)
            step = run.wait_for_step(first, 1)
            run.wait_for_step(first, step + 5)
        finally:
            slurm.start_node("n2")
            slurm.start_node("n3")
    (view,) = run.history().attempts
    assert view.cause is Cause.OPERATOR, view.evidence
    second, third = changes_of(run)
    assert (second["way"], second["lost"], second["joined"]) == ("spare", ["n2"], ["n4"])
    assert second["world_size"] == 3
    assert (third["way"], third["lost"], third["world_size"]) == ("shrink", ["n3"], 2)


@pytest.mark.more
@pytest.mark.timeout(400)
def test_an_attempt_leaves_a_node_that_is_drained(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this, the nodes are looked at once a minute.
    monkeypatch.setattr(slurm_client, "CAPACITY_AGE_S", 1.0)
    resources = {**ALL_NODES, "nodes": 2, "spare_nodes": 1}
    run = run_on_all(tmp_path / "root", resources=resources, elastic={"choices": [2]})
    with supervised(run):
        first = wait_until(run.paths.list_attempts, "an attempt")[0]
        run.wait_for_step(first, 5)
        leading = run.claim(first).host
        drained = next(beat.host for beat in run.beats(first) if beat.host != leading)
        slurm.run("scontrol", "update", f"nodename={drained}", "state=drain", "reason=bad DIMM")
        try:
            wait_until(lambda: len(lines_of(run, EventKind.LAUNCH_STARTED)) > 1, "a launch", 90)
            step = run.wait_for_step(first, 1)
            run.wait_for_step(first, step + 10)
        finally:
            slurm.run("scontrol", "update", f"nodename={drained}", "state=resume")
    (view,) = run.history().attempts
    assert view.cause is Cause.OPERATOR, view.evidence
    second = lines_of(run, EventKind.LAUNCH_STARTED)[1]
    assert (second["way"], second["drained"], second["world_size"]) == ("spare", [drained], 2)
    assert (second["lost"], second["reason"]) == ([], f"{drained} (bad DIMM)")
    ended = lines_of(run, EventKind.LAUNCH_ENDED)[0]
    resumed = lines_of(run, EventKind.RESUMED)[1]
    assert (ended["ending"], resumed["step"]) == ("drained", ended["last_step"]), "steps were lost"
    assert not lines_of(run, EventKind.NODE_LOST)


@pytest.mark.more
@pytest.mark.timeout(400)
def test_another_node_leads_when_the_leading_node_is_lost(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    resources = {**ALL_NODES, "nodes": 2, "spare_nodes": 1}
    run = run_on_all(tmp_path / "root", resources=resources, elastic={"choices": [2]})
    with supervised(run):
        first = wait_until(run.paths.list_attempts, "an attempt")[0]
        run.wait_for_step(first, 5)
        leading = run.claim(first).host
        slurm.kill_node(leading)
        try:
            wait_until(lambda: len(lines_of(run, EventKind.LAUNCH_STARTED)) > 1, "a launch", 90)
            step = run.wait_for_step(first, 1)
            wait_until(lambda: "down" in slurm.node_states()[leading], "the loss", 60)
            # The job has lost its batch shell, and continues.
            run.wait_for_step(first, step + 10)
        finally:
            slurm.start_node(leading)
    (view,) = run.history().attempts
    assert view.cause is Cause.OPERATOR, view.evidence
    second = lines_of(run, EventKind.LAUNCH_STARTED)[1]
    assert (second["way"], second["lost"], second["world_size"]) == ("spare", [leading], 2)


@pytest.mark.more
@pytest.mark.timeout(600)
def test_a_drill_of_a_run_on_several_nodes_expects_it_to_continue(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    resources = {**ALL_NODES, "nodes": 2, "spare_nodes": 1}
    run = run_on_all(tmp_path / "root", resources=resources, elastic={"choices": [1, 2]})
    found = []
    with supervised(run):
        first = wait_until(run.paths.list_attempts, "an attempt")[0]
        run.wait_for_step(first, 5)
        for kind in ("node-loss-spare", "kill-agent"):
            result = drill_live(run.paths, [KINDS[kind]], 1, seed=3, tell=print)
            assert result.broken == []
            found += [(one.kind, one.ok, one.recovery) for one in result.faults]
    assert found == [(kind, True, Recovery.IN_PLACE) for kind in ("node-loss-spare", "kill-agent")]
    (view,) = run.history().attempts
    assert view.cause is Cause.OPERATOR, view.evidence
    assert [one["way"] for one in changes_of(run)] == ["spare", "shrink"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_all_nodes_of_a_fallback_continues_there(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    slurm.run("scontrol", "update", "PartitionName=spot", "State=DOWN")
    fallbacks = [{"partition": "prod", "after_min": 0.05}]
    run = run_on_all(
        tmp_path / "root",
        resources={**ALL_NODES, "fallbacks": fallbacks, "return_after_min": 0.05},
        elastic={"choices": [1, 2, 4]},
        supervision={"poll_s": 1.0, "backoff_s": 10, "restarts_in_place": 0},
    )
    try:
        with supervised(run):
            second = wait_until(lambda: run.paths.list_attempts()[1:], "the fallback")[0]
            run.wait_for_step(second, 5)
            slurm.kill_node("n3")
            try:
                third = wait_until(lambda: run.paths.list_attempts()[2:], "the next attempt")[0]
                run.wait_for_step(third, 1)
            finally:
                slurm.start_node("n3")
    finally:
        slurm.run("scontrol", "update", "PartitionName=spot", "State=UP")
    _, lost, again = run.history().attempts
    assert lost.cause is Cause.NODE_FAILURE
    assert lost.request is not None
    assert again.request is not None
    assert (lost.request.place, lost.gpus) == (1, 4)
    assert (again.request.place, again.gpus, again.request.exclude) == (1, 2, ("n3",))


@pytest.mark.more
def test_a_pending_job_may_use_a_host_that_is_no_longer_excluded(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    run = run_on_all(
        tmp_path / "root", resources={**ALL_NODES, "nodes": 3}, elastic={"choices": [3]}, steps=3
    )
    try:
        attempt = run.submit(exclude=("n3",))
        wait_until(lambda: run.history().attempts[0].state is AttemptState.PENDING, "the queue", 60)
        said = allow_hosts_again(run.history(), now=time.time(), writer="flow")
        assert said == "attempt 1: the pending job may use n3 again"
        run.claim(attempt)
    finally:
        slurm.run("scontrol", "update", "NodeName=n1", "State=RESUME")
        run.end_all()
    notes = [event.data["text"] for event in run.events(EventKind.NOTE)]
    assert notes.count(said.split(": ")[1]) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_continues_when_the_controller_has_lost_its_state(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    run = run_on_all(
        tmp_path / "root", resources={**ALL_NODES, "nodes": 2}, elastic={"choices": [2]}
    )
    with supervised(run):
        first = wait_until(run.paths.list_attempts, "an attempt")[0]
        run.wait_for_step(first, 5)
        slurm.lose_state()
        second = wait_until(lambda: run.paths.list_attempts()[1:], "the next attempt")[0]
        run.wait_for_step(second, 1)
    forgotten = run.history().attempts[0]
    assert forgotten.cause is not Cause.OPERATOR, forgotten.evidence
    assert any("the controller no longer knows it" in line for line in forgotten.evidence)
