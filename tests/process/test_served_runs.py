"""Runs on two nodes whose root is a real shared file system, each node with its own client.

The agents are started as Slurm would start them, each in a separate mount namespace. Only the
scheduler is replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Appended, so that no module of ours can shadow an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "filesystems"))

from served_mounts import Served, served
from tests.process.local_runs import LocalRun, processes_of, wait_until
from tests.process.test_lineage_ingest import dump

from holdfast.contracts.disk.filesystems import filesystem_of
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.documents import Request, Submission
from holdfast.contracts.records.history import AttemptView
from holdfast.contracts.states import AttemptState, Cause
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.reindex import reindex
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.workers import schedulers
from holdfast.workers.nodes.root_probe import find_problems
from holdfast.workers.schedulers.base import JobStatus
from holdfast.workers.schedulers.slurm import SlurmExecutor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 120
NODES = {"executor": "slurm", "gpus_per_node": 1, "gres": "none", "nodes": 2}


class Hosts(SlurmExecutor):
    """Hosts that start the agents of an attempt, in place of Slurm."""

    def __init__(self, shared: Served, root: Path) -> None:
        super().__init__()
        self.shared, self.root = shared, root
        self.agents: dict[str, list[subprocess.Popen[bytes]]] = {}

    def submit(self, paths: AttemptPaths, request: Request) -> Submission:
        names = [f"n{node}" for node in range(request.nodes)]
        self.agents[request.job_name] = [
            self._start(name, node, paths, names) for node, name in enumerate(names)
        ]
        return Submission(job_id=request.job_name, executor="slurm", submitted_at=time.time())

    def _start(
        self, name: str, node: int, paths: AttemptPaths, names: list[str]
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "SLURM_PROCID": str(node),
            "SLURM_JOB_ID": str(paths.number),
            "SLURMD_NODENAME": name,
            "SLURM_STEP_NODELIST": ",".join(names),
            "SLURM_CONF": "/nonexistent",
        }
        point = self.root.parent
        agent = [sys.executable, "-u", "-m", "holdfast.workers.agent.main", str(paths.request)]
        with open(point.parent / f"agent-{paths.number}-{name}.log", "wb") as log:
            return subprocess.Popen(
                [*self.shared.in_own_mount(point, f"{name}-{paths.number}"), *agent],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def status(
        self, request: Request, submission: Submission | None, *, since: float = 0.0
    ) -> JobStatus:
        agents = self.agents.get(request.job_name, [])
        is_over = all(agent.poll() is not None for agent in agents)
        state = AttemptState.FAILED if is_over else AttemptState.RUNNING
        return JobStatus(state=state, raw="FAILED" if is_over else "RUNNING")

    def find(self, request: Request) -> Submission | None:
        return None

    def live_jobs(self, request: Request) -> tuple[Submission, ...]:
        return ()

    def cancel(self, request: Request, submission: Submission) -> None:
        for agent in self.agents.get(request.job_name, []):
            agent.kill()
            agent.wait()


@pytest.fixture(params=["glusterfs", "seaweedfs"])
def hosts(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hosts]:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    point = tmp_path / "shared"
    point.mkdir()
    with served(request.param, tmp_path / "served") as shared:
        made = Hosts(shared, point / "runs")
        monkeypatch.setitem(schedulers._KINDS, "slurm", lambda: made)
        yield made
        for agents in made.agents.values():
            for agent in agents:
                agent.kill()
                agent.wait()


def run_on(hosts: Hosts) -> LocalRun:
    return LocalRun(
        hosts.root,
        grace_s=20.0,
        resources=NODES,
        elastic={"min_gpus": 1, "max_gpus": 2},
        checkpoint={"interval": 10},
        supervision={"restarts_in_place": 0, "notices": "off"},
        steps=STEPS,
        sleep_s=0.1,
    )


def agents_of(hosts: Hosts, attempt: AttemptPaths) -> list[subprocess.Popen[bytes]]:
    return next(
        agents for name, agents in hosts.agents.items() if name.endswith(f"{attempt.number:04d}")
    )


@pytest.mark.parametrize("hosts", ["glusterfs"], indirect=True)
def test_a_run_is_preempted_loses_a_node_and_completes(hosts: Hosts) -> None:
    point = hosts.root.parent
    seconds: dict[str, float] = {}
    with hosts.shared.mounted(point, "login-1"):
        assert filesystem_of(point).kind == "fuse.glusterfs"
        run = run_on(hosts)
        began = time.monotonic()
        first = run.submit()
        run.wait_for_step(first, 1)
        seconds["start"] = time.monotonic() - began
        run.wait_for_step(first, 25)
        began = time.monotonic()
        for agent in agents_of(hosts, first):
            agent.send_signal(signal.SIGTERM)
        preempted = run.wait_for_end()
        seconds["preemption"] = time.monotonic() - began
        check_nothing_lost(preempted, AttemptState.PREEMPTED, Cause.PREEMPTION)
    # The next supervisor is on another host: it has another client, with empty caches.
    with hosts.shared.mounted(point, "login-2"):
        second = run.submit()
        run.wait_for_step(second, (preempted.last_step or 0) + 15)
        began = time.monotonic()
        # The client of the node ends with its agent.
        agents_of(hosts, second)[1].kill()
        lost = run.wait_for_end()
        seconds["node loss"] = time.monotonic() - began
        assert (lost.state, lost.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
        assert lost.facts["lost_hosts"] == ["n1"]
        assert lost.first_step == (preempted.last_step or 0) + 1
        run.submit(1)
        last = run.wait_for_end()
        assert (last.state, last.world_size) == (AttemptState.COMPLETED, 1), last.evidence
        assert last.first_step == lost.facts["committed_step"] + 1
        assert last.last_step == STEPS
        steps = [one.step for one in committed_checkpoints(run.paths)]
        assert steps[-1] == STEPS
        # A step of which the lost node had written nothing cannot be committed.
        failed = run.events(EventKind.SAVE_FAILED)
        assert {event.data["attempt"] for event in failed} <= {second.number}
        with open_database() as database:
            ingest_run(database, run.paths)
            live = dump(database)
            began = time.monotonic()
            assert reindex(database, hosts.root).runs == [run.paths.name]
            seconds["reindex"] = time.monotonic() - began
            assert dump(database) == live
    print({what: round(taken, 1) for what, taken in seconds.items()}, hosts.shared.version())
    wait_until(lambda: not processes_of(run.paths), "the end of all", 60)


def check_nothing_lost(view: AttemptView, state: AttemptState, cause: Cause) -> None:
    assert (view.state, view.cause) == (state, cause), view.evidence
    assert view.facts["committed_step"] == view.last_step


@pytest.mark.parametrize("hosts", ["seaweedfs"], indirect=True)
def test_a_root_that_two_nodes_cannot_share_is_refused_before_a_launch(hosts: Hosts) -> None:
    with hosts.shared.mounted(hosts.root.parent, "login"):
        # Locks fail until the servers have found each other.
        wait_until(lambda: not find_problems(hosts.root.parent), "locks", 60)
        run = run_on(hosts)
        run.submit()
        view = run.wait_for_end()
        assert (view.state, view.cause) == (AttemptState.FAILED, Cause.USER_ERROR)
        assert "no node can use the root, which lacks" in view.evidence[0]
        assert "(fuse.seaweedfs)" in view.evidence[1]
        assert run.events(EventKind.LAUNCH_STARTED) == []
        print(view.evidence)
