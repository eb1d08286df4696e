"""Programs with workers of a data loader: one ends while it is in use, one is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
from torch.utils.data import DataLoader
from holdfast.trainer import Session

model = torch.nn.Linear(2, 2)
session = Session(model, directory=sys.argv[1], interval=1000)
loader = DataLoader(range(1000), num_workers=1, worker_init_fn=session.worker_init)
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
batches = iter(DataLoader(range(1000), num_workers=1, prefetch_factor=1))
for step in session.steps(1000):
    next(batches)
    if step == 2:
        # As torchrun passes on a signal: to the rank and to all of its children.
        os.killpg(0, signal.SIGTERM)
session.close()
print("stopped after", session.step, flush=True)
"""
EXIT_S = 60.0


def run(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program without an agent, in a process group of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    return subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        env=env,
        capture_output=True,
        text=True,
        timeout=EXIT_S,
        check=False,
        start_new_session=True,
    )


def test_active_data_loader_does_not_block_process_exit(tmp_path: Path) -> None:
    done = run(PROGRAM, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    worker = done.stdout.split()[-1]
    assert not Path(f"/proc/{worker}").exists()


def test_a_stop_signal_to_all_processes_stops_the_rank_and_not_its_workers(tmp_path: Path) -> None:
    done = run(STOPPED, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1000
    assert "step-" in "".join(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
