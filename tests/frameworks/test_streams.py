"""Frameworks whose data is a stream: killed, preempted and resized, compared sample by sample."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.frameworks.stream_runs import IDS, StreamRun, StreamRuns
from tests.process.stream_program import EPOCHS
from tests.support import forked

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "streams" / "train.py"
WAIT_S: Final = 300.0
KILLED: Final = -signal.SIGKILL
FRAMEWORKS: Final = ("accelerate", "fabric", "lightning", "transformers")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.more]


def cells() -> Iterator[Any]:
    for framework in FRAMEWORKS:
        for source, workers in (("lines", 0), ("shuffled", 2), ("named", 0)):
            yield pytest.param(framework, source, workers, {}, id=f"{framework}-{source}-{workers}")
    others: dict[str, tuple[str, int, dict[str, Any]]] = {
        # The last batches of an epoch fill no step.
        "transformers-accumulation": ("lines", 0, {"accumulation": 3}),
        "transformers-save": ("lines", 2, {"save": "epoch"}),
        "accelerate-accumulation": ("lines", 2, {"accumulation": 2, "batch": 1}),
        "accelerate-split": ("lines", 0, {"batch": 6, "config": {"split_batches": True}}),
        "accelerate-divided": ("shuffled", 0, {"config": {"dispatch_batches": False}}),
    }
    for name, parts in others.items():
        yield pytest.param(name.partition("-")[0], *parts, id=name)


@pytest.mark.parametrize(("framework", "source", "workers", "more"), list(cells()))
def test_a_stream_continues_to_the_bit_and_at_another_size_without_loss(
    tmp_path: Path, framework: str, source: str, workers: int, more: dict[str, Any]
) -> None:
    runs = StreamRuns(tmp_path, framework, source, workers, **more)
    runs.launch()
    killed, stopped, again, preempted, ended = runs.statuses[1:6]
    assert KILLED in killed
    assert KILLED in again
    assert stopped == preempted == ended == [0, 0]
    assert runs.cut.samples() == runs.whole.samples()
    assert [len(each) for each in runs.statuses[6:]] == [2, 1, 3]
    assert "divided again (parts 2 → 1" in runs.said
    assert {line["world"] for line in runs.resized.lines()} == {1, 2, 3}
    for run in (runs.whole, runs.resized):
        check_epochs(run, more)


def check_epochs(run: StreamRun, more: dict[str, Any]) -> None:
    """Check that each epoch has each sample once. The steps may end within a further epoch."""
    if run.settings["framework"] == "transformers" and "accumulation" in more:
        # A step may have batches of two epochs.
        assert set(run.counts().values()) <= {EPOCHS, EPOCHS + 1}
        assert run.counts().keys() == set(IDS)
        return
    for epoch in range(EPOCHS):
        assert run.counts(epoch) == Counter(IDS), epoch
    assert set(run.counts(EPOCHS).values()) <= {1}


def test_the_example_of_a_stream_continues(tmp_path: Path) -> None:
    first, second = (run_example(tmp_path, steps) for steps in (6, 9))
    assert "begins at step 0" in first
    assert "continues after step 6" in second


def run_example(folder: Path, steps: int) -> str:
    """Run the example with torchrun on two ranks up to a step, and return its output."""
    given = {"output_dir": folder / "model", "max_steps": steps, "save_strategy": "no"}
    given |= {"per_device_train_batch_size": 4, "report_to": "none"}
    options = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    env |= {"HOLDFAST_ROOT": str(folder / "runs"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = forked.run([*command, EXAMPLE, "--use_cpu", *options], env=env, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
