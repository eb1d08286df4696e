"""A program that ends while its data loader is in use, with workers that ignore stop signals."""

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
EXIT_S = 60.0


def test_active_data_loader_does_not_block_process_exit(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        env=env,
        capture_output=True,
        text=True,
        timeout=EXIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    worker = done.stdout.split()[-1]
    assert not Path(f"/proc/{worker}").exists()
