"""The predicted memory of a checkpoint on N ranks, compared with what N ranks then use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.spec.resources import Resources
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.sections import Elastic
from holdfast.workers.runs.run_folders import create_run

PROGRAM = Path(__file__).with_name("shape_program.py")
TIMEOUT_S = 150.0
TOLERANCE = 0.10


def train(run: Path, mode: str, ranks: int, scratch: Path) -> list[dict[str, int]]:
    """The memory of each rank, as it reports it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, str(PROGRAM), str(run), mode],
        env={**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("[{"))
    taken: list[dict[str, int]] = json.loads(line)
    return taken


def make_run(root: Path, **spec: Any) -> RunPaths:
    wanted = RunSpec(name="r", command=("train.py",), **spec)
    return create_run(wanted, root, created_by="a test")


def doctor(root: Path, *arguments: str) -> tuple[int, Any]:
    called = ["doctor", *arguments, "--root", str(root), "--json"]
    result = CliRunner().invoke(app, called)
    said = result.output or str(result.exception)
    return result.exit_code, json.loads(result.stdout) if result.stdout else said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "launches"),
    [
        ("sharded", (1, 2)),
        pytest.param("sharded", (2, 1), marks=pytest.mark.slow),
        pytest.param("whole", (1, 2), marks=pytest.mark.slow),
    ],
)
def test_predicted_memory_equals_the_memory_used(
    mode: str, launches: tuple[int, ...], tmp_path: Path
) -> None:
    resources = Resources(executor="local", gpus_per_node=2)
    paths = make_run(tmp_path, resources=resources, elastic=Elastic(min_gpus=1, max_gpus=2))
    for ranks in launches:
        predicted = None
        if paths.list_checkpoints():
            status, predicted = doctor(tmp_path, "fit", "r", "--gpus", str(ranks))
            assert status == 0, predicted
            assert predicted["ok"]
            assert set(predicted["counts"]) == {1, 2}
        taken = train(paths.directory, mode, ranks, tmp_path)
        assert len(taken) == ranks
        if predicted is None:
            continue
        for part in ("device", "staging"):
            most = max(one[part] for one in taken)
            assert predicted["bytes_per_rank"][part] == pytest.approx(most, rel=TOLERANCE), part
    first = paths.list_checkpoints()[0].name
    status, found = doctor(tmp_path, "fit", "r", "--gpus", "1", "--checkpoint", f"r:{first}")
    assert (status, found["checkpoint"]) == (0, f"r:{first}")
    status, found = doctor(tmp_path, "fit", "r", "--gpus", "3")
    assert status == 1, "three GPUs are more than the spec allows"
    assert not found["ok"]
    assert "elastic 1 to 2" in found["problem"]


def test_run_without_a_checkpoint_is_reported(tmp_path: Path) -> None:
    make_run(tmp_path)
    status, found = doctor(tmp_path, "fit", "r", "--gpus", "1")
    assert status != 0
    assert "no committed checkpoint" in found


def test_incomplete_shape_options_are_a_usage_error(tmp_path: Path) -> None:
    status, _ = doctor(tmp_path, "--gpus", "2")
    assert status == 2
