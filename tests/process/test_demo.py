"""The demo from start to end, and the commands that it prints last."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DEMO_S_MAX = 500.0
COMMAND_S_MAX = 120.0
SHOWN = ("1. Preempted:", "2. Saved:", "3. Resumed:", "4. Completed:", "5. Verified:")


def test_demo_module_can_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import demo"],
        cwd=CHECKOUT / "examples",
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_demo_reports_each_stage_and_its_closing_commands_work(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path)}
    environment.pop("HOLDFAST_ROOT", None)
    demo = [sys.executable, str(CHECKOUT / "examples" / "demo.py")]
    done = subprocess.run(
        demo, env=environment, capture_output=True, text=True, timeout=DEMO_S_MAX, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for beginning in SHOWN:
        assert len([line for line in lines if line.startswith(beginning)]) == 1, done.stdout
    commands = [line.strip() for line in lines if line.startswith("  HOLDFAST_HOME=")]
    assert [shlex.split(line)[2] for line in commands] == ["show", "lineage", "serve"]
    for line in commands[:2]:
        said = subprocess.run(
            ["sh", "-c", line], capture_output=True, text=True, timeout=COMMAND_S_MAX, check=True
        )
        assert "completed" in said.stdout
