"""Calls of the trainer package in the job's own environment, which has torch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from holdfast.contracts.errors import CheckpointError, PreflightError
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.spec import RunSpec

# A folder without modules, because `python -m` searches the current folder first.
NEUTRAL_FOLDER: Final = "/"
ANSWER_S_MAX: Final = 300.0
LOOK_S: Final = 0.5
LEAVE_S: Final = 10.0
# The last line of a traceback of the trainer itself. A missing module has another type.
_FAILED: Final = ("KeyError", "ValueError", "TypeError", "RuntimeError", "IndexError", "OSError")


def interpreter_of(paths: RunPaths, spec: RunSpec) -> list[str]:
    """Return the words that start the Python for work on a run's checkpoints.

    A spec's `launch.wrapper` and `launch.python` are programs chosen by the author of the spec.
    They run only if the run's folder and spec belong to the caller or to root.
    """
    if not paths.is_mine():
        return [sys.executable]
    return [*spec.launch.wrapper, spec.launch.python or sys.executable]


def ask_trainer(
    python: Sequence[str],
    module: str,
    *arguments: str,
    timeout_s: float = ANSWER_S_MAX,
    look: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Return the JSON that `python -m holdfast.trainer.<module> ARGUMENTS --json` prints.

    Paths in `arguments` are absolute. `look` is called twice a second, and an exception in it ends
    the work. Raises `CheckpointError` with the trainer's message for a problem with the checkpoint.
    Raises `PreflightError` if `python` cannot run, is too slow or has no trainer.
    """
    name = shlex.join(python)
    command = [*python, "-m", f"holdfast.trainer.{module}", *arguments, "--json"]
    try:
        output, errors = _run(command, timeout_s, look)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(
            f"{name} could not read the checkpoint ({error}); check that the spec's "
            "launch.wrapper and launch.python run on this machine"
        ) from error
    try:
        found: dict[str, Any] = json.loads(output)
    except ValueError:
        last = errors.strip().rpartition("\n")[2]
        if last.startswith("holdfast: "):
            raise CheckpointError(last.removeprefix("holdfast: ")) from None
        if last.startswith(_FAILED):
            raise CheckpointError(
                f"the checkpoint cannot be read: {last}; verify it, and report the error if it is "
                "whole"
            ) from None
        raise PreflightError(
            f"{name} cannot read checkpoints: {last or 'it printed no error'}; install "
            "`holdfast[trainer]` there, or use a machine that has the job's environment"
        ) from None
    return found


def _run(command: list[str], timeout_s: float, look: Callable[[], object]) -> tuple[str, str]:
    """Return a command's standard output and error; end the command if `look` raises."""
    give_up = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        cwd=NEUTRAL_FOLDER,
    ) as process:
        try:
            while True:
                try:
                    return process.communicate(timeout=LOOK_S)
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= give_up:
                        raise subprocess.TimeoutExpired(command[:3], timeout_s) from None
                    look()
        finally:
            process.terminate()
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
