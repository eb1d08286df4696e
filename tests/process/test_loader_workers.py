"""Programs with workers of a data loader: one ends while it is in use, one is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.process.local_runs import LocalRun, processes_of, wait_until

from holdfast.contracts.states import AttemptState, Cause

PROGRAM = """
import sys
import torch
from torch.utils.data import DataLoader
from holdfast.trainer import Session

model = torch.nn.Linear(2, 2)
session = Session(model, directory=sys.argv[1], interval=1000)
loader = DataLoader(range(1000), num_workers=1)
kept = iter(loader)
# A reference cycle, as torchdata's iterators have: it is not collected before the program ends.
kept.itself = kept
for step in session.steps(3):
    next(kept)
session.close()
print("workers", kept._workers[0].pid, flush=True)
"""
STOPPED = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
from holdfast.trainer import Session

model = torch.nn.Linear(2, 2)
session = Session(model, directory=sys.argv[1], interval=1000)
loader = DataLoader(
    range(10**6), num_workers=1, prefetch_factor=1, multiprocessing_context=sys.argv[2]
)
batches = iter(loader)
for step in session.steps(10**6):
    next(batches)
    if step == 2:
        # As torchrun passes on a signal: to the rank and to all of its children.
        os.killpg(0, signal.SIGTERM)
session.close()
print("stopped after", session.step, flush=True)
"""
AGENT_PROGRAM = Path(__file__).with_name("loader_program.py")
EXIT_S = 60.0


def run(program: str, directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program without an agent, in a separate process group."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    return subprocess.run(
        [sys.executable, "-c", program, str(directory), *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=EXIT_S,
        check=False,
        start_new_session=True,
    )


@pytest.mark.more
def test_active_data_loader_does_not_block_process_exit(tmp_path: Path) -> None:
    done = run(PROGRAM, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    worker = done.stdout.split()[-1]
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.more
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_stop_signal_to_all_processes_stops_the_rank_and_not_its_workers(
    tmp_path: Path, context: str
) -> None:
    done = run(STOPPED, tmp_path / "run", context)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 10**6
    assert "step-" in "".join(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.more
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_preemption_that_signals_all_processes_of_a_job_loses_no_step(
    tmp_path: Path, context: str
) -> None:
    """As Slurm does: the agent, torchrun, the ranks and the workers of their loaders."""
    run = LocalRun(tmp_path / "root", program=AGENT_PROGRAM, context=context, steps=4000)
    try:
        attempt = run.submit()
        run.wait_for_step(attempt, 3)
        for process in processes_of(run.paths):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        view = run.wait_for_end()
    finally:
        run.end_all()
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION), view.evidence
    assert view.facts["committed_step"] == view.last_step
    outcome = run.outcome(attempt)
    assert [launch.ending for launch in outcome.launches] == ["stopped"]
    wait_until(lambda: not processes_of(run.paths), "the end of every process")
