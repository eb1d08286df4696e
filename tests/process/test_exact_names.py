"""A checkpoint has canonical parameter names, whatever the model is wrapped in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.flusher_supervisor import SlotHolder

PROGRAM = Path(__file__).with_name("forms_program.py")
RANKS = 2
WAIT_S = 250.0


@pytest.mark.more
def test_each_model_wrapping_loads_every_other(tmp_path: Path) -> None:
    flusher_supervisor = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, PROGRAM, str(rank), str(RANKS), tmp_path, flusher_supervisor.name],
                env=env,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        errors = [process.communicate(timeout=WAIT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        flusher_supervisor.close()
    assert [process.returncode for process in ranks] == [0] * RANKS, "\n".join(errors)
