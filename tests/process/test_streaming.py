"""The real package of MosaicML Streaming: its shards in `MdsShards`, its dataset in a `Session`.

It has an environment of its own, which the first test makes: infra/setup/layered.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from tests.process.stream_program import EPOCHS, GLOBAL_BATCH
from tests.process.test_streams import STOPS, Launch, StreamRun
from tests.support.streaming_package import ROOT, environment, write_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S: Final = 240
# A multiple of the global batch. Otherwise Streaming repeats samples at the end of an epoch.
SAMPLES: Final = 11 * GLOBAL_BATCH
LEFT: Final = "0000*_*"


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of the environment with the package."""
    return environment()


@pytest.fixture(scope="module")
def written(python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder that Streaming's writer has filled, and what `mds_program` printed."""
    folder = tmp_path_factory.mktemp("written")
    return folder, write_shards(python, folder, SAMPLES)


class StreamingRun(StreamRun):
    """A run over a `StreamingDataset`, in the environment with the package."""

    def __init__(
        self, python: str, data: Path, folder: Path, workers: int, source: str = "streaming"
    ) -> None:
        self.python, self.folder = python, folder
        folder.mkdir(exist_ok=True)
        super().__init__(folder, source, workers)
        self.settings["data"] = str(data)

    def write_data(self) -> None:
        """The shards are written already."""

    def run(self, command: list[Any], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command, whose file locks are in the folder."""
        env = {**env, "TMPDIR": str(self.folder)}
        return subprocess.run(
            list(map(str, command)), env=env, capture_output=True, text=True, timeout=WAIT_S
        )


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(LEFT)}


def test_mds_shards_gives_the_samples_that_streaming_gives(written: tuple[Path, Any]) -> None:
    assert len(written[1]) == 7
    for kind, (samples, equal, shards) in written[1].items():
        assert (samples, equal) == (50, 50), kind
        assert shards > 1


@pytest.fixture(scope="module")
def whole(
    python: str, written: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> StreamingRun:
    """A run of two ranks without workers that nothing interrupted."""
    run = StreamingRun(python, written[0] / "data", tmp_path_factory.mktemp("whole"), 0)
    run.launch(2)
    return run


@pytest.mark.parametrize(
    ("source", "workers", "stops"),
    [("streaming", 0, STOPS[:1]), ("streaming", 2, STOPS), ("remote", 2, STOPS[2:4])],
)
def test_a_killed_or_preempted_run_continues_in_streaming_s_order_to_the_bit(
    python: str, whole: StreamingRun, tmp_path: Path, source: str, workers: int, stops: list[Launch]
) -> None:
    before = shared_memory()
    data = Path(whole.settings["data"])
    run = StreamingRun(python, data, tmp_path / "run", workers, source)
    for stop in stops:
        run.launch(*stop)
    assert "continues after step" in run.launch(2)
    # The noise of `transform`, the losses and the draws of the program too.
    assert run.samples() == whole.samples()
    assert shared_memory() == before


BARE = """
import json, os, sys
from pathlib import Path
from torch import distributed as dist
from tests.process.stream_program import import_streaming, streaming_dataset
if __name__ == "__main__":
    dist.init_process_group("gloo")
    data = streaming_dataset(Path(sys.argv[1]))
    loader = import_streaming().StreamingDataLoader(data, batch_size=data.batch_size)
    mine = [[batch["id"].tolist() for batch in loader] for _ in range(int(sys.argv[2]))]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if dist.get_rank() == 0:
        print(json.dumps(found))
"""


def test_the_order_is_that_of_streaming_s_own_loader(python: str, whole: StreamingRun) -> None:
    data = Path(whole.settings["data"])
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    lines = whole.lines()
    assert run_text(python, BARE, data, *torchrun) == [
        [[line["ids"] for line in lines if (line["rank"], line["epoch"]) == (rank, epoch)]
         for epoch in range(EPOCHS)]
        for rank in range(2)
    ]  # fmt: skip


def run_text(python: str, text: str, data: Path, *options: str) -> Any:
    """Run a program over the shards of `data`. Return the JSON that it printed."""
    program = data.with_name("program.py")
    program.write_text(text)
    where = {"PYTHONPATH": str(ROOT), "TMPDIR": str(data.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, *options, str(program), str(data), str(EPOCHS)],
        cwd=data.parent,
        env={**os.environ, **where},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


REFUSED = """
import json, sys, torch
from holdfast.trainer import Session
from tests.process.stream_program import import_streaming

def data(**more):
    options = {"batch_size": 6, "shuffle": True, "num_canonical_nodes": 2, **more}
    return import_streaming().StreamingDataset(local=sys.argv[1], **options)

def open_session():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return Session(model, torch.optim.SGD(model.parameters(), 0.1), directory="run", interval=1)

def refusal(options, **arguments):
    try:
        session.stream(data(**options), **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

if __name__ == "__main__":
    session = open_session()
    errors = [
        refusal({"batch_size": None}), refusal({}, batch_size=4), refusal({}, shuffle=True),
        refusal({"batching_method": "stratified"}),
    ]
    loader, given = session.stream(data(), num_workers=2), []
    for few in (2, 3, 99):
        for number, batch in enumerate(loader, 1):
            given += batch["id"].tolist()
            session.boundary()
            if number == few:
                break
    session.close()
    session = open_session()
    errors.append(refusal({"shuffle_seed": 7}))
    session.close()
    print(json.dumps({"errors": errors, "given": given}))
"""


def test_what_cannot_continue_is_refused_and_an_early_end_is_continued(
    python: str, written: tuple[Path, Any]
) -> None:
    found = run_text(python, REFUSED, written[0] / "data")
    for text, error in zip(
        (
            "with batch_size=None: expected the samples of each rank and step",
            "4 samples of each rank and step, and a StreamingDataset with batch_size=6",
            "shuffle=True with a StreamingDataset, which has its own order",
            "batching_method='stratified', which is not known to continue exactly",
            "CheckpointError: the StreamingDataset is not the one of the checkpoint (shuffle_seed",
        ),
        found["errors"],
        strict=True,
    ):
        assert text in error
    assert Counter(found["given"]) == Counter(range(SAMPLES))


def test_a_resized_run_gets_the_samples_of_each_step_of_streaming_s_order(
    python: str, whole: StreamingRun, tmp_path: Path
) -> None:
    before = shared_memory()
    run = StreamingRun(python, Path(whole.settings["data"]), tmp_path / "run", 2)
    run.launch(2, "STOP", 4)
    run.launch(1, "KILL", 8)
    run.launch(3)
    assert {line["world"] for line in run.lines()} == {1, 2, 3}
    assert by_step(run) == by_step(whole)
    for epoch in range(EPOCHS):
        assert run.counts(epoch) == Counter(range(SAMPLES))
    assert shared_memory() == before


def by_step(run: Any) -> dict[int, list[tuple[int, float]]]:
    """The samples of each step on all ranks, with the noise of their transforms."""
    found: dict[int, list[tuple[int, float]]] = {}
    for line in run.lines():
        found.setdefault(line["step"], []).extend(zip(line["ids"], line["noise"], strict=True))
    return {step: sorted(samples) for step, samples in found.items()}


REPLICATED = """
import json, sys, torch
from pathlib import Path
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from holdfast.trainer import Session
from tests.process.stream_program import streaming_dataset

def read(mesh, few):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = Session(model, optimizer, directory="replicated", interval=1, mesh=mesh)
    data = streaming_dataset(Path(sys.argv[1]), replication=2, batch_size=3)
    loader, given = session.stream(data), []
    for number, batch in enumerate(loader, 1):
        given.append(batch["id"].tolist())
        session.boundary()
        if number == few:
            break
    session.close()
    return given

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = [None] * 4
    dist.all_gather_object(found, read(mesh, 4) + read(mesh, 99))
    if dist.get_rank() == 0:
        print(json.dumps(found))
"""


def test_replication_gives_the_ranks_of_a_model_the_same_samples_and_continues(
    python: str, whole: StreamingRun
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    found = run_text(python, REPLICATED, Path(whole.settings["data"]), *torchrun)
    lines = [line for line in whole.lines() if line["epoch"] == 0]
    expected = [[line["ids"] for line in lines if line["rank"] == rank] for rank in range(2)]
    assert found == [expected[0], expected[0], expected[1], expected[1]]
