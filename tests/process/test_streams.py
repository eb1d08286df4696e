"""Streams of shards: killed, preempted and resized, compared sample by sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import stream_program
from tests.process.stream_program import EPOCHS, SIZES, write_data
from tests.support import forked
from tests.support.stream_lines import lines_in, samples_in

PROGRAM = Path(stream_program.__file__)
WAIT_S = 240.0
IDS = [100 * shard + number for shard, size in enumerate(SIZES) for number in range(size)]
# Rank 0 is stopped, or all ranks are killed, within a step.
Launch = tuple[int, str, int]

pytestmark = pytest.mark.timeout(900)


class StreamRun:
    """One run over several launches, in a folder with its data."""

    python = sys.executable

    def __init__(self, folder: Path, source: str, workers: int, **more: Any) -> None:
        self.directory, self.launches = folder / "run", 0
        self.data = folder / "data"
        self.write_data()
        named = {"directory": str(self.directory), "data": str(self.data)}
        self.settings = {**named, "source": source, "workers": workers, **more}

    def write_data(self) -> None:
        """Write the shards."""
        write_data(self.data)

    def launch(self, ranks: int, how: str = "", step: int = 0) -> str:
        """Launch the identical command once. Return its output."""
        command = [self.python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--master-port", "0", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0"]
        env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        env |= {"HOLDFAST_CHECKPOINT_INTERVAL": "3", "OMP_NUM_THREADS": "1"}
        env |= {"STREAM_LAUNCH": str(self.launches), "HF_HUB_OFFLINE": "1"}
        self.launches += 1
        if how:
            env[f"STREAM_{how}_AT"] = str(step)
        done = self.run([*command, PROGRAM, json.dumps(self.settings)], env)
        is_cut = how in ("KILL", "REFUSED")
        assert (done.returncode != 0) == is_cut, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, command: list[Any], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return forked.run(command, env=env, timeout=WAIT_S)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of all ranks, by step and rank. Only the last launch of a step counts."""
        return lines_in(self.directory)

    def samples(self) -> list[dict[str, Any]]:
        """The lines without what tells launches apart."""
        return samples_in(self.directory)

    def counts(self, epoch: int) -> Counter[int]:
        """How often each sample was given in an epoch."""
        return Counter(i for line in self.lines() if line["epoch"] == epoch for i in line["ids"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], StreamRun]:
    """Runs of two ranks that nothing interrupted."""
    runs: dict[tuple[str, int], StreamRun] = {}

    def of(source: str, workers: int) -> StreamRun:
        if (source, workers) not in runs:
            run = StreamRun(tmp_path_factory.mktemp("whole"), source, workers)
            run.launch(2)
            runs[source, workers] = run
        return runs[source, workers]

    return of


def cells() -> Iterator[Any]:
    """Each source with and without workers. `make test` runs the first only."""
    for source in ("lines", "shuffled", "filtered", "tar", "webdataset", "nodes", "mds"):
        for workers in (0, 2):
            more = [] if (source, workers) == ("lines", 0) else [pytest.mark.more]
            yield pytest.param(source, workers, marks=more, id=f"{source}-{workers}")


def expected(source: str) -> Counter[int]:
    return Counter(one for one in IDS if source != "filtered" or one % 5)


STOPS: list[Launch] = [
    (2, "KILL", 3), (2, "STOP", 5), (2, "KILL", 10), (2, "STOP", 13), (2, "KILL", 17)
]  # fmt: skip


@pytest.mark.parametrize(("source", "workers"), list(cells()))
def test_a_killed_or_preempted_run_gets_the_same_samples_to_the_bit(
    whole: Callable[[str, int], StreamRun], tmp_path: Path, source: str, workers: int
) -> None:
    reference = whole(source, workers)
    for epoch in range(EPOCHS):
        assert reference.counts(epoch) == expected(source)
    run = StreamRun(tmp_path, source, workers)
    for stop in STOPS:
        run.launch(*stop)
    assert "continues after step" in run.launch(2)
    assert run.samples() == reference.samples()


@pytest.mark.more
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_s_loader_is_exact_at_its_size_and_refused_at_another(
    whole: Callable[[str, int], StreamRun], tmp_path: Path, workers: int
) -> None:
    reference = whole("stateful", workers)
    assert set(reference.counts(0)) == set(range(len(IDS)))
    run = StreamRun(tmp_path, "stateful", workers)
    for stop in STOPS:
        run.launch(*stop)
    refused = run.launch(1, "REFUSED")
    assert "was saved by each of 2 ranks and cannot continue at 1" in " ".join(refused.split())
    assert "continues after step" in run.launch(2)
    assert run.samples() == reference.samples()


@pytest.mark.parametrize(("source", "workers"), list(cells()))
def test_a_resized_run_gets_each_sample_of_an_epoch_once(
    tmp_path: Path, source: str, workers: int
) -> None:
    run = StreamRun(tmp_path, source, workers)
    run.launch(2, "STOP", 4)
    assert "divided again (parts 2 → 1" in run.launch(1, "KILL", 8)
    assert "divided again (parts" in run.launch(3)
    assert {line["world"] for line in run.lines()} == {1, 2, 3}
    for epoch in range(EPOCHS):
        assert run.counts(epoch) == expected(source)


@pytest.mark.more
def test_a_shard_that_vanished_is_refused_at_another_size_until_it_is_there(
    tmp_path: Path,
) -> None:
    run = StreamRun(tmp_path, "lines", 2)
    run.launch(2, "STOP", 4)
    shard = run.data / "2.jsonl"
    kept = shard.rename(tmp_path / "kept")
    refused = run.launch(3, "REFUSED")
    assert "the shards of the stream are not those of the checkpoint (shards 6 → 5" in refused
    assert {line["world"] for line in run.lines()} == {2}
    # Cut off: it has the name, and another size.
    shard.write_bytes(kept.read_bytes()[:-1])
    assert "its name or size has changed" in run.launch(1, "REFUSED")
    kept.rename(shard)
    assert "divided again (parts 2 → 3" in run.launch(3)
    for epoch in range(EPOCHS):
        assert run.counts(epoch) == expected("lines")


@pytest.mark.more
def test_fewer_shards_than_ranks_continue_at_three_ranks_with_other_workers(
    tmp_path: Path,
) -> None:
    run = StreamRun(tmp_path, "lines", 0, shards=1)
    run.launch(2, "STOP", 1)
    run.settings["workers"] = 2
    assert "workers 0 → 2" in run.launch(3, "KILL", 3)
    run.settings["workers"] = 1
    run.launch(3)
    assert {line["world"] for line in run.lines()} == {2, 3}
    for epoch in range(EPOCHS):
        assert run.counts(epoch) == Counter(range(SIZES[0]))
