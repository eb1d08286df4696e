"""With Prefect's task result cache turned on, each relaunch still submits a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("flow_cache_program.py")


@pytest.mark.more
def test_two_relaunches_with_the_same_arguments_submit_two_jobs(tmp_path: Path) -> None:
    # In a separate process: once a flow has run in a process, Prefect's exit handlers make
    # every child that it forks exit with status 1, such as a data loader's workers.
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "gpt")],
        env={**os.environ, "PREFECT_HOME": str(tmp_path / "prefect")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [2, 2]
