"""The check `allreduce`: the real program, between processes and by a real agent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun, processes_of, wait_until

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState

WAIT_S = 90.0
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program of one node, and ends all of them afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start_one(node: int, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "holdfast.trainer.health_allreduce"]
        command += [f"--file={tmp_path / 'meeting.json'}", f"--node={node}", "--nodes=2", *more]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(WAIT_S)


def test_two_nodes_of_two_processes_sum_up(start: Start) -> None:
    both = [start(node, "--processes=2") for node in (0, 1)]
    outputs = [process.communicate(timeout=WAIT_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert all("the sums are right" in output for output in outputs)


@pytest.mark.more
def test_a_node_without_its_partner_fails_in_time(start: Start, tmp_path: Path) -> None:
    for node, text in ((1, "first node's store did not answer"), (0, "rank 0:")):
        one = start(node, "--timeout-s=2")
        output, _ = one.communicate(timeout=WAIT_S)
        assert one.returncode == 1, output
        assert text in output
        assert ("meeting.json does not exist" in output) == (node == 1)
        assert output.rstrip().endswith("the all-reduce failed")


@pytest.mark.slow
def test_a_partner_that_hangs_or_dies_fails_the_check(start: Start, tmp_path: Path) -> None:
    """The partner's process is suspended before it answers; then its successor is killed."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        (tmp_path / "meeting.json").unlink(missing_ok=True)
        partner = start(1)
        wait_until(partial(_children_of, partner.pid), "the partner's process")
        children = _children_of(partner.pid)
        for pid in [partner.pid, *children]:
            os.kill(pid, number)
        one = start(0, "--timeout-s=3")
        began = time.monotonic()
        output, _ = one.communicate(timeout=WAIT_S)
        for pid in children:
            # A suspended child would outlive its parent.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert one.returncode == 1, output
        assert "the all-reduce failed" in output
        assert time.monotonic() - began < WAIT_S / 2


def _children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.more
def test_a_single_node_runs_the_check_alone(tmp_path: Path) -> None:
    run = LocalRun(tmp_path / "root", gpus=1, steps=3, health={"before": ["ready", "allreduce"]})
    try:
        attempt = run.submit()
        view = run.wait_for_end()
        assert view.state is AttemptState.COMPLETED, view.evidence
        assert run.events(EventKind.NODE_UNHEALTHY) == []
        assert not attempt.health.exists()
    finally:
        run.end_all()
    wait_until(lambda: not processes_of(run.paths), "the end of every process")
