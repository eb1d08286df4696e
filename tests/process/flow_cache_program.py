"""A flow that relaunches a run twice with the same arguments, and prints what it submitted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prefect import flow
from prefect.settings import PREFECT_TASKS_DEFAULT_PERSIST_RESULT, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from holdfast.contracts.disk.paths import RunPaths
from holdfast.flows import train
from holdfast.flows.supervisor import submission

submitted: list[int] = []


def submit_next(paths: RunPaths, **asked: Any) -> None:
    """Record the submission instead of sending it to a scheduler."""
    submitted.append(asked["gpus"])


@flow(retries=0)
def relaunch_twice(directory: Path) -> None:
    """Prefect digests arguments of the same value to the same cache key."""
    for _ in range(2):
        train.submit_attempt(
            RunPaths(directory), gpus=2, reason="relaunch at 2 GPUs by ann", exclude=()
        )


if __name__ == "__main__":
    persisting = {PREFECT_TASKS_DEFAULT_PERSIST_RESULT: True}
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings(persisting),
        patch.object(submission, "submit_next", submit_next),
    ):
        relaunch_twice(Path(sys.argv[1]))
    print(json.dumps(submitted))
