"""Training on GPUs: a killed and resumed run is bit-identical to an uninterrupted one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths

PROGRAM = Path(__file__).with_name("training_program.py")
STEPS, INTERVAL, KILL_AT = 12, 4, 7
WAIT_S = 240.0


def launch(directory: Path, form: str, device: torch.device, kill_at: int = 0) -> dict[str, Any]:
    """Launch the identical command once; returns rank 0's output, empty if it was killed."""
    settings = {"form": form, "device": device.type, "steps": STEPS, "directory": str(directory)}
    ranks = max(1, min(2, torch.cuda.device_count())) if device.type == "cuda" else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    env |= {"HOLDFAST_CHECKPOINT_INTERVAL": str(INTERVAL), "OMP_NUM_THREADS": "1"}
    env |= {"HOLDFAST_CHECKPOINT_SNAPSHOTS": "off"}
    done = subprocess.run(
        [*command, str(PROGRAM), json.dumps(settings, sort_keys=True)],
        env=env | {"EXACT_KILL_AT": str(kill_at)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode == 0) == (kill_at == 0), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["plain", "scaler", "compiled", "offloaded", "mixed"])
def test_killed_and_resumed_training_is_bit_identical(
    form: str, device: torch.device, tmp_path: Path
) -> None:
    whole = launch(tmp_path / "whole", form, device)
    launch(tmp_path / "killed", form, device, kill_at=KILL_AT)
    committed = [read_manifest(path) for path in RunPaths(tmp_path / "killed").list_checkpoints()]
    assert INTERVAL in {manifest.step for manifest in committed if manifest is not None}
    # Without a pause: the driver may still be freeing the memory of the killed ranks.
    resumed = launch(tmp_path / "killed", form, device)
    first = resumed["losses"][0][0]
    assert first in {INTERVAL + 1, KILL_AT + 1}
    assert resumed["losses"] == whole["losses"][first - 1 :]
    assert resumed["digest"] == whole["digest"]
