"""The main tests of jobs also pass with a newer Slurm; `make test-slurm` runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
VERSION = "24.11"
CHOSEN = "two_node_job or preempted_job_commits or every_job_state"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_train_and_are_preempted_with_a_newer_slurm(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # A short name: munge's socket has to fit into the 108 characters of a Unix address.
    base = tmp_path_factory.mktemp("n") / "b"
    pytest_words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command = [*pytest_words, f"--basetemp={base}", "tests/slurm/test_submission.py", "-k", CHOSEN]
    other = [sys.executable, "infra/slurm/other_version.py", "run", VERSION, "--"]
    done = subprocess.run(
        [*other, *command],
        cwd=REPOSITORY,
        # The other root has this folder, which contains pytest's own, in the place of its own.
        env={**os.environ, "TMPDIR": os.environ["PYTEST_DEBUG_TEMPROOT"]},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "3 passed" in done.stdout
