"""A `StreamingDataset` of MosaicML Streaming in the frameworks, compared sample by sample.

The package has an environment of its own, which the first test makes: infra/setup/layered.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.frameworks.stream_runs import LAUNCHES_S, StreamRuns
from tests.frameworks.test_streams import FRAMEWORKS, KILLED
from tests.process.stream_program import EPOCHS, GLOBAL_BATCH
from tests.process.test_streaming import by_step, shared_memory
from tests.support.streaming_package import ROOT, environment, write_shards

from holdfast.trainer.frameworks.streamed import EVALUATED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# A multiple of the global batch. Otherwise Streaming repeats samples at the end of an epoch.
SAMPLES: Final = 11 * GLOBAL_BATCH


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of the environment with the package."""
    return environment()


@pytest.fixture(scope="module")
def data(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards that Streaming's writer wrote."""
    folder = tmp_path_factory.mktemp("written")
    write_shards(python, folder, SAMPLES)
    return folder / "data"


class StreamingRuns(StreamRuns):
    """Runs over a `StreamingDataset`, in the environment with the package."""

    def __init__(self, python: str, data: Path, folder: Path, *given: Any, **more: Any) -> None:
        self._python, self._folder, self._data = python, folder, data
        super().__init__(folder, *given, **more)

    def write_data(self, data: Path) -> None:
        data.symlink_to(self._data)

    def run(self, name: str, launches: str) -> str:
        """Run a program of `tests`. Return its output."""
        return run_text(self._python, self._folder, f"tests.{name}", launches)


def run_text(python: str, folder: Path, *command: str) -> str:
    """Run a module whose file locks are in `folder`. Return what it printed."""
    where = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-m", *command],
        cwd=ROOT,
        env={**os.environ, **where},
        capture_output=True,
        text=True,
        timeout=LAUNCHES_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr + done.stdout


def cells() -> Iterator[Any]:
    # The trainer gets the number of epochs in place of the number of steps.
    more = {"transformers": {"max_steps": -1}}
    for framework in FRAMEWORKS:
        for workers in (0, 2):
            name = f"{framework}-{workers}"
            yield pytest.param(framework, workers, more.get(framework, {}), id=name)
    accumulation = {"accumulation": 3, "max_steps": 22}
    yield pytest.param("transformers", 0, accumulation, id="transformers-accumulation")
    split = {"batch": 6, "config": {"split_batches": True}}
    yield pytest.param("accelerate", 0, split, id="accelerate-split")


@pytest.mark.parametrize(("framework", "workers", "more"), list(cells()))
def test_a_streaming_dataset_continues_to_the_bit_and_in_its_own_order_at_another_size(
    python: str, data: Path, tmp_path: Path, framework: str, workers: int, more: dict[str, Any]
) -> None:
    before = shared_memory()
    runs = StreamingRuns(python, data, tmp_path, framework, "streaming", workers, **more)
    runs.launch()
    killed, stopped, again, preempted, ended = runs.statuses[1:6]
    assert KILLED in killed, runs.said
    assert KILLED in again, runs.said
    assert stopped == preempted == ended == [0, 0], runs.said
    assert runs.cut.samples() == runs.whole.samples()
    assert {line["world"] for line in runs.resized.lines()} == {1, 2, 3}, runs.said
    for run in (runs.whole, runs.resized):
        assert run.counts() == Counter(dict.fromkeys(range(SAMPLES), EPOCHS))
    # Accelerate keeps each process's batch, so its steps have other samples at another size.
    if framework != "accelerate" or "config" in more:
        assert by_step(runs.resized) == by_step(runs.whole)
    assert shared_memory() == before


def test_an_evaluation_over_the_dataset_of_the_training_is_refused(
    python: str, data: Path, tmp_path: Path
) -> None:
    """With Lightning, before the first step. With the others, when the evaluation begins."""
    program = "tests.frameworks.streaming_refusals"
    said = run_text(python, tmp_path, program, str(data), str(tmp_path))
    found = json.loads(said.splitlines()[-1])
    assert len(found) == 13
    for name, error in found.items():
        expected = "no error" if name.endswith("another") else f"SpecError: {EVALUATED}"
        assert error == expected, name
