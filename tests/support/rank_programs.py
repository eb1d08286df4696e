"""Runs programs of `tests` that fork their ranks, and kills all their processes at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from tests.support.forked import Forked

ROOT: Final = Path(__file__).parents[2]
KILL_WAIT_S: Final = 30.0


def start_program(name: str, *arguments: object) -> Forked:
    """Start `python -m tests.NAME ARGUMENTS` by a fork, in a new session."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return Forked(
        [sys.executable, "-m", f"tests.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search},
    )


def kill_program(process: Forked) -> None:
    """Kill the program and its ranks; no effect if they have ended."""
    process.kill()
    process.wait(KILL_WAIT_S)


def run_program(name: str, *arguments: object, timeout_s: float) -> str:
    """Run the program and return its output. Raises AssertionError with its errors if it fails."""
    process = start_program(name, *arguments)
    try:
        said, errors = process.communicate(timeout=timeout_s)
    finally:
        kill_program(process)
    assert process.returncode == 0, errors[-6000:]
    return said
