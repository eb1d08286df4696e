"""What only the job's own environment can do, asked of it: torch is needed to read a checkpoint."""

from __future__ import annotations

import json
import subprocess
from typing import Any, Final

from holdfast.contracts.errors import CheckpointError, PreflightError

ANSWER_S_MAX: Final = 300.0


def ask_trainer(
    python: str, module: str, *arguments: str, timeout_s: float = ANSWER_S_MAX
) -> dict[str, Any]:
    """The JSON that `python -m holdfast.trainer.<module> ARGUMENTS --json` answers.

    Raises `CheckpointError` with its own words when the checkpoint is what it complains of, and
    `PreflightError` when `python` cannot be run in time or has no trainer.
    """
    command = [python, "-m", f"holdfast.trainer.{module}", *arguments, "--json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(
            f"{python} could not be asked about the checkpoint ({error}); see that the spec's "
            "launch.python can be run on this machine"
        ) from error
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        told = done.stderr.strip().rpartition("\n")[2]
        if told.startswith("holdfast: "):
            raise CheckpointError(told.removeprefix("holdfast: ")) from None
        raise PreflightError(
            f"{python} cannot read checkpoints: {told or 'it said nothing'}; install "
            "`holdfast[trainer]` there, or ask from a machine that has the job's environment"
        ) from None
    return found
