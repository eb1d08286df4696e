"""Starting programs of `tests` that fork their ranks, and leaving nothing of them behind."""

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
    """`python -m tests.NAME ARGUMENTS`, in a session of its own."""
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
    """Kill it and its ranks at once; nothing when they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def run_program(name: str, *arguments: object, timeout_s: float) -> str:
    """What it printed. Raises AssertionError with what it complained of unless all ended well."""
    process = start_program(name, *arguments)
    try:
        said, errors = process.communicate(timeout=timeout_s)
    finally:
        kill_program(process)
    assert process.returncode == 0, errors[-6000:]
    return said
