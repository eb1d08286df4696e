"""Calls of the trainer package in the job's own environment, which has torch."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from holdfast.contracts import errors
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.spec.run_spec import RunSpec

# A folder without modules, because `python -m` searches the current folder first.
NEUTRAL_FOLDER: Final = "/"
ANSWER_S_MAX: Final = 300.0
LOOK_S: Final = 0.5
LEAVE_S: Final = 10.0
SHOWN_CHARACTERS: Final = 200
# The last line of a Python that lacks the trainer or one of its libraries.
_LACKS: Final = ("ModuleNotFoundError", "ImportError", "No module named", "Error while finding")
_USAGE: Final = re.compile(r"\bpython -m holdfast\.\S+: error: (.*)", re.DOTALL)


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
    the work. Raises `CheckpointError` with the trainer's message for a problem with the checkpoint,
    or with the error that ended it, and `SpecError` for an argument that it refuses. Raises
    `PreflightError` if `python` cannot run, is too slow or has no trainer.
    """
    name = shlex.join(python)
    command = [*python, "-m", f"holdfast.trainer.{module}", *arguments, "--json"]
    try:
        status, output, stderr = _run(command, timeout_s, look)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise errors.PreflightError(
            f"{name} could not read the checkpoint ({error}); check that the spec's "
            "launch.wrapper and launch.python run on this machine"
        ) from error
    # A wrapper may print lines before the answer. The status is 1 if the answer is no.
    with contextlib.suppress(ValueError):
        found = json.loads(output.strip().rpartition("\n")[2])
        if status in {0, 1} and isinstance(found, dict):
            return found
    raise _problem(name, status, output, stderr.strip())


def _problem(name: str, status: int, output: str, stderr: str) -> errors.HoldfastError:
    """Return why the trainer gave no answer, from its exit status and standard error."""
    last = stderr.rpartition("\n")[2]
    if last.startswith("holdfast: "):
        return errors.CheckpointError(last.removeprefix("holdfast: "))
    if usage := _USAGE.search(stderr):
        return errors.SpecError(plain_line(usage[1]))
    if status < 0:
        return errors.CheckpointError(
            f"{name} was ended by signal {-status} ({signal.strsignal(-status)}) before it "
            "answered; a kill often means that the machine lacks memory"
        )
    if last.startswith(_LACKS):
        return errors.PreflightError(
            f"{name} cannot read checkpoints: {last}; install Holdfast with the extra `trainer` "
            "there, or use a machine that has the job's environment"
        )
    if status == 0:
        return errors.CheckpointError(
            f"{name} printed no answer, but {output[-SHOWN_CHARACTERS:].strip()!r}; expected one "
            "line of JSON at the end"
        )
    return errors.CheckpointError(
        f"{name} failed with exit status {status}: {last or 'it printed no error'}; if the "
        "checkpoint verifies, report the error"
    )


def _run(command: list[str], timeout_s: float, look: Callable[[], object]) -> tuple[int, str, str]:
    """Return a command's exit status and its two outputs; end the command if `look` raises."""
    give_up = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        # Otherwise a module in the caller's folder could hide one of Holdfast's.
        cwd=NEUTRAL_FOLDER,
    ) as process:
        try:
            while True:
                try:
                    output, stderr = process.communicate(timeout=LOOK_S)
                    return process.returncode, output, stderr
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
