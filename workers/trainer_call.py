"""What only the job's own environment can do, asked of it: torch is needed to read a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.contracts.errors import CheckpointError, PreflightError
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.reading import is_mine
from holdfast.contracts.spec import RunSpec

# The folder of nobody: `python -m` looks for modules in the current one first.
NEUTRAL_FOLDER: Final = "/"
ANSWER_S_MAX: Final = 300.0
LOOK_S: Final = 0.5
LEAVE_S: Final = 10.0


def interpreter_of(paths: RunPaths, spec: RunSpec) -> str:
    """The Python that may be asked about a run's checkpoints: its spec's own, or this one.

    A spec's `launch.python` is a program of whoever wrote the spec. It is started only where the
    run's folder and its spec belong to the caller or to root.
    """
    is_trusted = is_mine(paths.directory) and is_mine(paths.spec)
    return spec.launch.python if is_trusted and spec.launch.python else sys.executable


def ask_trainer(
    python: str,
    module: str,
    *arguments: str,
    timeout_s: float = ANSWER_S_MAX,
    look: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The JSON that `python -m holdfast.trainer.<module> ARGUMENTS --json` answers.

    Paths in `arguments` are absolute. `look` is called twice a second; what it raises ends the
    work. Raises `CheckpointError` with its own words when the checkpoint is what it complains of,
    and `PreflightError` when `python` cannot be run in time or has no trainer.
    """
    command = [python, "-m", f"holdfast.trainer.{module}", *arguments, "--json"]
    try:
        answered, complained = _run(command, timeout_s, look)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(
            f"{python} could not be asked about the checkpoint ({error}); see that the spec's "
            "launch.python can be run on this machine"
        ) from error
    try:
        found: dict[str, Any] = json.loads(answered)
    except ValueError:
        told = complained.strip().rpartition("\n")[2]
        if told.startswith("holdfast: "):
            raise CheckpointError(told.removeprefix("holdfast: ")) from None
        raise PreflightError(
            f"{python} cannot read checkpoints: {told or 'it said nothing'}; install "
            "`holdfast[trainer]` there, or ask from a machine that has the job's environment"
        ) from None
    return found


def _run(command: list[str], timeout_s: float, look: Callable[[], object]) -> tuple[str, str]:
    """What a command writes to standard output and error; it ends with whoever waits for it."""
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
