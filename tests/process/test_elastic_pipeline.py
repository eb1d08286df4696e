"""A run continues at another pipeline degree with identical losses and samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("elastic_session_program.py")
WAIT_S = 250.0


@pytest.mark.more
def test_run_changes_from_two_pipeline_stages_to_one_and_back(tmp_path: Path) -> None:
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path],
        env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    changed, same = (lines_of(tmp_path / name) for name in ("changed", "same"))
    assert [line.pop("stages") for line in changed] == [2] * 6 + [1] * 6 + [2] * 6
    assert [line.pop("stages") for line in same] == [1] * 18
    assert changed == same
    checkpoints = RunPaths(tmp_path / "changed").list_checkpoints()
    manifests = [read_manifest(path) for path in checkpoints]
    assert [(m.step, m.topology["pipeline"]) for m in manifests if m] == [(6, 2), (12, 1), (18, 2)]


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
