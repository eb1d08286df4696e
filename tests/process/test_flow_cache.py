"""A site whose Prefect keeps every task's result: each relaunch submits a job all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_TASKS_DEFAULT_PERSIST_RESULT, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from holdfast.contracts.paths import RunPaths
from holdfast.flows import train


def test_two_relaunches_with_the_same_arguments_submit_two_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int] = []

    def submit_next(paths: RunPaths, **asked: Any) -> None:
        submitted.append(asked["gpus"])

    monkeypatch.setattr(train, "submit_next", submit_next)
    # Prefect digests arguments of the same value to the same cache key.
    paths = RunPaths(tmp_path / "gpt")

    @flow(retries=0)
    def relaunch_twice() -> None:
        for _ in range(2):
            train.submit_attempt(paths, gpus=2, reason="relaunch at 2 GPUs by ann", exclude=())

    persisting = {PREFECT_TASKS_DEFAULT_PERSIST_RESULT: True}
    with prefect_test_harness(server_startup_timeout=120), temporary_settings(persisting):
        relaunch_twice()
    assert submitted == [2, 2]
