"""Starts programs of `tests` that fork their ranks, and kills all their processes at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def start_program(name: str, *arguments: object) -> subprocess.Popen[str]:
    """Start `python -m tests.NAME ARGUMENTS` in a new session."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.{name}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill_program(process: subprocess.Popen[str]) -> None:
    """Kill the program and its ranks; no effect if they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def run_program(name: str, *arguments: object, timeout_s: float) -> str:
    """Run the program and return its output. Raises AssertionError with its errors if it fails."""
    process = start_program(name, *arguments)
    try:
        said, errors = process.communicate(timeout=timeout_s)
    finally:
        kill_program(process)
    assert process.returncode == 0, errors[-6000:]
    return said
