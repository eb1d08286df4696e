"""Clocks of nodes that are minutes apart, clocks that are set, and jobs that are suspended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.local_runs import LocalRun, processes_of, wait_until
from tests.support.clocks import Clock, build_library

from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.documents import write_document
from holdfast.contracts.records.history import load_events
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.runs import operator, run_folders
from holdfast.workers.runs.attempts import reserve
from holdfast.workers.runs.request import build_request

pytestmark = pytest.mark.timeout(300)

MINUTES = 600.0
# Longer than the heartbeats, the silence limits and the queues of these runs.
SUSPENDED_S = 20.0
GRACE_S = 30.0
DISTURBANCES = frozenset(
    {
        *(EventKind.NODE_LOST, EventKind.NODE_SILENT, EventKind.HANG_SUSPECTED),
        *(EventKind.HANG_CONFIRMED, EventKind.STOP_FAILED, EventKind.SAVE_FAILED),
    }
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    """A run of one node, which saves every 50 steps."""
    one = LocalRun(
        tmp_path / "root",
        gpus=2,
        steps=1_000_000,
        sleep_s=0.02,
        grace_s=GRACE_S,
        checkpoint={"interval": 50, "snapshots": 5},
        supervision={"silence_s": {"train": 6.0}},
    )
    yield one
    one.end_all()


@contextlib.contextmanager
def inherited(variables: dict[str, str]) -> Iterator[None]:
    """Have the processes that start in the block inherit `variables`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def stop(run: LocalRun, attempt: AttemptPaths, clock: Clock | None = None) -> None:
    """Stop the run as an operator does; check that it was in time and lost no step.

    The `clock` is set far ahead meanwhile.
    """
    began = time.monotonic()
    operator.request(run.paths, "stop", by="tester")
    if clock is not None:
        clock.set(6 * MINUTES)
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.CANCELLED, Cause.OPERATOR), view.evidence
    assert time.monotonic() - began < GRACE_S
    outcome = run.outcome(attempt)
    assert outcome.last_step is not None
    assert outcome.committed_step == outcome.last_step
    assert [launch.ending for launch in outcome.launches] in (["left"], ["stopped"])


def shows(run: LocalRun, attempt: AttemptPaths, node: int, shift_s: float) -> bool:
    """True if the node's newest heartbeat has a time that is `shift_s` ahead of this clock."""
    times = [beat.time for beat in run.beats(attempt) if beat.node == node]
    return any(abs(at - time.time() - shift_s) < MINUTES / 10 for at in times)


def disturbances(run: LocalRun) -> list[Any]:
    return [event for event in load_events(run.paths) if event.kind in DISTURBANCES]


@pytest.mark.more
@pytest.mark.parametrize("start_s", [MINUTES, pytest.param(-MINUTES, marks=pytest.mark.slow)])
def test_a_clock_that_is_set_while_a_run_trains_changes_nothing(
    run: LocalRun, library: Path, tmp_path: Path, start_s: float
) -> None:
    clock = Clock(library, tmp_path / "shift", start_s)
    with inherited(clock.environment):
        attempt = run.submit()
    step = run.wait_for_step(attempt, 30)
    for shift_s in (-start_s, start_s, 0.0):
        clock.set(shift_s)
        step = run.wait_for_step(attempt, step + 60)
        assert run.history().last_attempt is not None
        assert run.history().attempts[-1].state is AttemptState.RUNNING
        wait_until(partial(shows, run, attempt, 0, shift_s), "heartbeats by the new clock")
    clock.set(-start_s)
    stop(run, attempt, clock)
    assert disturbances(run) == []
    assert len(run.events(EventKind.LAUNCH_STARTED)) == 1


@pytest.mark.slow
def test_a_job_that_is_suspended_goes_on_afterwards(run: LocalRun) -> None:
    """Every process of the job stops for longer than all limits, as on a suspended machine."""
    attempt = run.submit()
    run.wait_for_step(attempt, 60)
    frozen = processes_of(run.paths)
    assert len(frozen) >= 5, frozen
    for process in frozen:
        process.suspend()
    step = max(rank.step for beat in run.beats(attempt) for rank in beat.ranks)
    began = time.monotonic()
    while time.monotonic() - began < SUSPENDED_S:
        assert run.history().attempts[-1].state is AttemptState.RUNNING
        time.sleep(1.0)
    for process in frozen:
        process.resume()
    run.wait_for_step(attempt, step + 100)
    assert {p.pid for p in frozen} <= {p.pid for p in processes_of(run.paths)}
    assert len(run.history().attempts) == 1
    stop(run, attempt)
    assert disturbances(run) == []
    assert len(run.events(EventKind.LAUNCH_STARTED)) == 1
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


# --- two nodes ------------------------------------------------------------------------------


@pytest.fixture
def no_slurm(tmp_path: Path) -> Path:
    """A folder with commands of Slurm that fail, because no controller answers."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "squeue", "sacct", "scancel", "sinfo"):
        (folder / name).write_text("#!/bin/sh\necho 'no controller' >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.more
@pytest.mark.parametrize("shift_s", [MINUTES, pytest.param(-MINUTES, marks=pytest.mark.slow)])
def test_two_nodes_whose_clocks_are_minutes_apart_train_and_stop_together(
    tmp_path: Path, library: Path, no_slurm: Path, shift_s: float
) -> None:
    """Two agents as Slurm starts them. The clock of node 1 is wrong, and is set while it trains."""
    run = LocalRun(
        tmp_path / "root",
        resources={"executor": "slurm", "nodes": 2, "gpus_per_node": 1, "gres": "none"},
        steps=1_000_000,
        sleep_s=0.02,
        grace_s=GRACE_S,
        checkpoint={"interval": 50, "snapshots": 5},
    )
    attempt = reserve(run.paths, 1)
    assert attempt is not None
    record = run_folders.read_record(run.paths)
    request = build_request(record, run.spec, attempt=1, gpus=2, reason="a test")
    write_document(attempt.request, request)
    clock = Clock(library, tmp_path / "shift", shift_s)
    agents = [start_agent(attempt, node, no_slurm, clock if node else None) for node in (0, 1)]
    try:
        step = run.wait_for_step(attempt, 60)
        wait_until(partial(shows, run, attempt, 1, shift_s), "heartbeats by the wrong clock")
        assert shows(run, attempt, 0, 0.0)
        clock.set(-shift_s)
        run.wait_for_step(attempt, step + 60)
        began = time.monotonic()
        agents[0].send_signal(signal.SIGTERM)
        assert [agent.wait(GRACE_S + 30) for agent in agents] == [0, 0]
        assert time.monotonic() - began < GRACE_S
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(30)
        for process in processes_of(run.paths):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    outcome = run.outcome(attempt)
    assert outcome.cause is Cause.PREEMPTION
    assert (outcome.hosts, outcome.world_size) == (("n0", "n1"), 2)
    assert outcome.committed_step == outcome.last_step
    assert [launch.ending for launch in outcome.launches] in (["left"], ["stopped"])
    events = [e for path in run.paths.list_journals() for e in read_journal(path)[0]]
    assert [event for event in events if event.kind in DISTURBANCES] == []


def start_agent(
    attempt: AttemptPaths, node: int, commands: Path, clock: Clock | None
) -> subprocess.Popen[bytes]:
    variables = {
        "SLURM_PROCID": str(node),
        "SLURM_JOB_ID": "77",
        "SLURMD_NODENAME": f"n{node}",
        "PATH": f"{commands}:{os.environ['PATH']}",
        **(clock.environment if clock else {}),
    }
    with open(attempt.directory / f"agent-{node}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.workers.agent.main", str(attempt.request)],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
