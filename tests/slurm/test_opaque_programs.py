"""A program that keeps its own checkpoints, as a Slurm job on two nodes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.process import opaque_program
from tests.process.local_runs import LocalRun, processes_of, send, wait_until

from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.states import AttemptState, Cause

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

STEPS = 1000
PER_NODE = 2


@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_two_nodes_are_preempted_crash_and_finish(
    launcher: str, make: Callable[..., LocalRun], tmp_path: Path
) -> None:
    run = make(
        program=Path(opaque_program.__file__),
        own={
            "checkpoints": f"{tmp_path}/out/checkpoint-{{step}}",
            "complete": ["state.json"],
            "settle_s": 0.5,
            "progress": r"\| step (?P<step>\d+) \|",
            "launcher": launcher,
        },
        config={"steps": STEPS},
        steps=STEPS,
        every=20,
        sleep_s=0.05,
        out=str(tmp_path / "out"),
        hurry=str(tmp_path / "hurry"),
    )
    attempt = run.submit()
    wait_until(lambda: committed_checkpoints(run.paths), "a recorded checkpoint", 60)
    send(run.claim(attempt).pid, signal.SIGTERM)
    first = run.wait_for_end()
    assert (first.state, first.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    last = committed_checkpoints(run.paths)[-1]
    assert (last.step, last.reason) == (first.last_step, "final")

    attempt = run.submit()
    run.wait_for_step(attempt, last.step + 5)
    each = PER_NODE if launcher == "torchrun" else 1
    node_1 = wait_until(lambda: programs_of(run.beats(attempt)[1].agent_pid), "node 1's program")
    assert len(node_1) == each
    send(node_1[0], signal.SIGKILL)
    again = [attempt.rank_log(node, 2, node * PER_NODE) for node in (0, 1)]
    wait_until(lambda: all("starts" in text_of(log) for log in again), "another launch", 60)
    (tmp_path / "hurry").touch()
    second = run.wait_for_end()
    assert (second.state, second.cause, second.evidence) == (AttemptState.COMPLETED, None, ())
    assert (second.first_step, second.last_step) == (last.step + 1, STEPS)
    assert [one.ending for one in run.outcome(attempt).launches] == ["crashed", "completed"]
    assert committed_checkpoints(run.paths)[-1].step == STEPS
    wait_until(lambda: not processes_of(run.paths), "the end of every process", 60)


def programs_of(agent: int) -> list[int]:
    """The pids of the program's processes below a node's agent."""
    found = []
    for one in psutil.Process(agent).children(recursive=True):
        # Some end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            # Without torchrun, which has the program behind its own options.
            if Path(opaque_program.__file__).name in one.cmdline()[1:6]:
                found.append(one.pid)
    return found


def text_of(log: Path) -> str:
    return log.read_text() if log.exists() else ""
