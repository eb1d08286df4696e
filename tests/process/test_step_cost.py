"""The cost of a session: no system call in a step without a save, no memory growth by saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.process.steady_program import BEGIN, END

PROGRAM = Path(__file__).with_name("steady_program.py")
STEPS, SAVES = 5000, 100
WAIT_S = 240.0


def run(*command: str) -> dict[str, Any]:
    """Run a command and return the JSON that the program printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_step_without_a_save_makes_no_system_call_and_allocates_nothing(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace"
    # Without -f strace follows only the training thread, which must not wait.
    strace = ("strace", "-o", str(trace))
    program = (sys.executable, str(PROGRAM), "steps", str(tmp_path / "run"), str(STEPS))
    found = run(*strace, *program)
    lines = trace.read_text().splitlines()
    (begin,) = (i for i, line in enumerate(lines) if BEGIN in line)
    (end,) = (i for i, line in enumerate(lines) if END in line)
    calls = [line.partition("(")[0] for line in lines[begin + 1 : end]]
    # The interpreter passes its lock to the session's threads about once per second.
    assert [call for call in calls if call != "futex"] == []
    assert len(calls) < STEPS / 100
    assert found["step"] == STEPS + 50
    assert found["blocks"] < STEPS / 100


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    found = run(sys.executable, str(PROGRAM), "saves", str(tmp_path / "run"), str(SAVES))
    assert found["saves"] == SAVES + 10
    assert found["after"] <= found["before"] * 1.01
