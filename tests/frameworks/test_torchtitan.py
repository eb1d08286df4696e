"""torchtitan under Holdfast: interrupted runs equal those of torchtitan alone, and refusals.

The real torchtitan runs on two ranks over gloo, with FSDP2. It has an environment of its own, which
the first test makes: infra/setup/layered.sh.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tests.process.local_runs import LocalRun, processes_of, send, wait_until

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.topology import problem_with_mesh
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = Path(__file__).with_name("torchtitan_program.py")
EXAMPLE: Final = ROOT / "examples" / "torchtitan"
SETUP_S: Final = 550
LAUNCH_S: Final = 300
# Sums of floating point numbers in another order.
LOSS_APART_MAX: Final = 1e-5
SAMPLES, SEQ_LEN, LOCAL_BATCH, DOCUMENTS = 24, 16, 2, 40
IGNORED: Final = -100


@pytest.fixture(scope="session")
def titan() -> Path:
    """The Python of the environment with torchtitan."""
    setup = [str(ROOT / "infra" / "setup" / "layered.sh"), "torchtitan"]
    subprocess.run(setup, check=True, timeout=SETUP_S)
    return ROOT / ".setup" / "torchtitan" / "bin" / "python"


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(titan: Path, tmp_path: Path) -> Launch:
    """Starts the program with torchrun, and returns how it ended."""

    def start(
        folder: str, ranks: int = 2, program: Path = PROGRAM, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        torchrun: list[Any] = [titan, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        where = make_data(tmp_path / folder)
        return subprocess.run(
            [*torchrun, program, json.dumps({"folder": str(where), **settings})],
            cwd=where,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_ROOT": str(where / "root")},
            capture_output=True,
            text=True,
            timeout=LAUNCH_S,
            check=False,
        )

    return start


def make_data(folder: Path) -> Path:
    """Create `folder` with a file of tokens. No two samples begin with the same tokens."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    np.save(folder / "tokens.npy", draw.integers(1, 256, SAMPLES * SEQ_LEN + 5, dtype=np.uint16))
    return folder


def succeeded(ended: subprocess.CompletedProcess[str]) -> bool:
    """Return True if the program ended by itself, and False if it left after a stop."""
    assert ended.returncode == 0, ended.stderr[-6000:]
    return "the program has ended" in ended.stdout


def lines_of(folder: Path, rank: int, key: str = "step") -> list[dict[str, Any]]:
    text = (folder / f"rank{rank}.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if key in line]


def record_of(folder: Path, rank: int) -> tuple[dict[int, Any], dict[int, Any]]:
    """The last line of each step, and of each validation."""
    steps = {line["step"]: line for line in lines_of(folder, rank)}
    return steps, {line["validated"]: line for line in lines_of(folder, rank, "validated")}


def problem_with(run: Path, ranks: int) -> str | None:
    """Return why a relaunch of the run in folder `run` on so many ranks is refused, or None."""
    newest = read_manifest(RunPaths(run).list_checkpoints()[-1])
    assert newest is not None
    return problem_with_mesh(newest, ranks)


# --- equal to torchtitan alone ------------------------------------------------------------------


@pytest.fixture
def run(titan: Path, tmp_path: Path) -> Iterator[LocalRun]:
    one = LocalRun(
        tmp_path / "root",
        program=PROGRAM,
        checkpoint={"interval": 2},
        launch={"python": str(titan)},
        folder=str(make_data(tmp_path / "run")),
        steps=12,
        sleep_s=0.5,
    )
    yield one
    one.end_all()


def test_run_is_killed_stopped_and_finished_on_one_rank(
    run: LocalRun, launch: Launch, tmp_path: Path
) -> None:
    """A rank is killed, the run is stopped, and one rank finishes with the same global batches."""
    assert succeeded(launch("bare", steps=12, manager="torchtitan", checkpoint={"enable": False}))
    first = run.submit()
    run.wait_for_step(first, 3)
    ranks = [one for one in processes_of(run.paths) if one.environ().get("RANK") == "1"]
    ranks[-1].kill()
    wait_until(lambda: len(run.events(EventKind.RESUMED)) > 1, "the second launch")
    run.wait_for_step(first, 5)
    send(run.claim(first).pid, signal.SIGTERM)
    assert run.wait_for_end().state is AttemptState.PREEMPTED
    assert problem_with(run.paths.directory, 1) is None
    # Four samples in each step are two local batches.
    assert "cannot share its global batch evenly, which has 2 parts" in str(
        problem_with(run.paths.directory, 4)
    )
    run.submit(gpus=1)
    last = run.wait_for_end()
    assert (last.state, last.evidence) == (AttemptState.COMPLETED, ()), last
    compare(tmp_path / "run", tmp_path / "bare")
    metrics = run.paths.metrics_of(2, 1).read_text().splitlines()
    logged = {
        line["step"]: line["loss_metrics/global_avg_loss"] for line in map(json.loads, metrics)
    }
    alone = record_of(tmp_path / "run", 0)[0]
    for step, loss in logged.items():
        assert math.isclose(loss, alone[step]["loss"], rel_tol=LOSS_APART_MAX)


def compare(broken: Path, whole: Path) -> None:
    """Steps on two ranks are equal to the bit. Those on one rank have the same samples."""
    expected = [record_of(whole, rank)[0] for rank in range(2)]
    found = [record_of(broken, rank)[0] for rank in range(2)]
    assert sorted(found[0]) == sorted(expected[0]) == list(range(1, 13))
    worlds = [found[0][step]["world"] for step in range(1, 13)]
    assert set(worlds) == {1, 2}
    for step, world in enumerate(worlds, 1):
        both = [record[step] for record in expected]
        if world == 2:
            assert [record[step] for record in found] == both
            continue
        alone = found[0][step]
        assert sorted(alone["samples"]) == sorted(both[0]["samples"] + both[1]["samples"])
        assert alone["lr"] == both[0]["lr"]
        assert alone["tokens"] == both[0]["tokens"] + both[1]["tokens"]
        loss = both[0]["loss"] + both[1]["loss"]
        assert math.isclose(alone["loss"], loss, rel_tol=LOSS_APART_MAX)


def test_own_loader_continues_at_its_degree_only(launch: Launch, tmp_path: Path) -> None:
    """A stop comes before the validation of its step, and the resume runs it once.

    At another degree, the loader may begin afresh.
    """
    settings = {"steps": 5, "loader": "torchtitan", "validates": True}
    assert succeeded(launch("bare", **settings, manager="torchtitan", checkpoint={"enable": False}))
    assert not succeeded(launch("run", **settings, term=[0, 2]))
    stopped_after = max(record_of(tmp_path / "run", 0)[0])
    assert stopped_after < 5
    assert stopped_after not in record_of(tmp_path / "run", 0)[1]
    own = tmp_path / "run" / "root" / PROGRAM.stem
    assert "the place of its data loader is kept by rank" in str(problem_with(own, 1))
    refused = launch("run", ranks=1, **settings)
    assert refused.returncode != 0
    assert (
        "the HuggingFaceTextDataLoader was saved at data-parallel degree 2 and cannot continue at 1"
    ) in refused.stderr
    assert "to_iterable_dataset(num_shards=64)" in refused.stderr
    assert max(record_of(tmp_path / "run", 0)[0]) == stopped_after
    assert succeeded(launch("run", **settings))
    for rank in range(2):
        assert record_of(tmp_path / "run", rank) == record_of(tmp_path / "bare", rank)
        validated = [one["validated"] for one in lines_of(tmp_path / "run", rank, "validated")]
        assert validated == [1, 2, 3, 4, 5]
    settings["steps"] = 6
    afresh = {"exclude_from_loading": ["dataloader"]}
    assert succeeded(launch("run", ranks=1, **settings, checkpoint=afresh))
    assert record_of(tmp_path / "run", 0)[0][6]["world"] == 1


def test_own_loader_with_a_worker_continues_between_its_snapshots(
    launch: Launch, tmp_path: Path
) -> None:
    """torchdata keeps the state of a worker at multiples of `interval`. The stop lies between."""
    settings = {"steps": 5, "ranks": 1, "loader": "torchtitan", "workers": 1}
    assert succeeded(launch("bare", **settings, manager="torchtitan", checkpoint={"enable": False}))
    assert not succeeded(launch("run", **settings, term=[0, 2], checkpoint={"interval": 10}))
    assert succeeded(launch("run", **settings))
    assert record_of(tmp_path / "run", 0) == record_of(tmp_path / "bare", 0)


def test_stream_continues_to_the_bit(launch: Launch, tmp_path: Path) -> None:
    """A step has two batches of each rank, so the step after the last ones spans two epochs."""
    settings = {"steps": 12, "loader": "stream", "workers": 2, "global_batch": 8}
    assert succeeded(launch("whole", **settings))
    assert not succeeded(launch("run", **settings, term=[0, 3]))
    assert succeeded(launch("run", **settings))
    for rank in range(2):
        assert record_of(tmp_path / "run", rank) == record_of(tmp_path / "whole", rank)
    check_epochs(tmp_path / "run", 1)
    refused = launch("run", **{**settings, "steps": 14, "loader": "mapped"})
    assert refused.returncode != 0
    assert "cannot continue after its map or filter, because datasets 4.7.0 loses" in refused.stderr


def test_shuffled_stream_continues_at_every_degree(launch: Launch, tmp_path: Path) -> None:
    """Two ranks are stopped, the only one of the next launch is killed, and three continue."""
    settings = {"steps": 14, "loader": "shuffled", "workers": 1, "global_batch": 12}
    assert not succeeded(launch("run", **settings, term=[0, 2]))
    own = tmp_path / "run" / "root" / PROGRAM.stem
    assert problem_with(own, 1) is problem_with(own, 3) is None
    assert launch("run", ranks=1, **settings, kill=[0, 6]).returncode != 0
    assert succeeded(launch("run", ranks=3, **settings))
    steps = record_of(tmp_path / "run", 0)[0]
    assert [steps[number]["world"] for number in (1, 4, 14)] == [2, 1, 3]
    check_epochs(tmp_path / "run", 2)


def check_epochs(run: Path, complete: int) -> None:
    """Check that each epoch has each token of each document once, in batches of one size."""
    given: dict[int, Counter[tuple[int, int]]] = {}
    records = [record_of(run, rank)[0] for rank in range(3) if (run / f"rank{rank}.jsonl").exists()]
    for step, line in records[0].items():
        for record in records[: line["world"]]:
            assert record[step]["world"] == line["world"]
            for epoch, inputs, labels in record[step]["rows"]:
                assert np.shape(inputs) == np.shape(labels) == (LOCAL_BATCH, SEQ_LEN)
                pairs = zip(np.ravel(inputs).tolist(), np.ravel(labels).tolist(), strict=True)
                found = Counter(pair for pair in pairs if pair[1] != IGNORED)
                given[epoch] = given.get(epoch, Counter()) + found
    texts = [" ".join(map(str, range(at, at + 9))).encode() for at in range(DOCUMENTS)]
    expected = Counter(pair for text in texts for pair in pairwise([1, *text, 0]))
    assert max(given) >= complete
    for epoch in range(complete):
        assert given[epoch] == expected
    assert given[complete] <= expected


def test_another_global_batch_by_default_is_refused(launch: Launch, tmp_path: Path) -> None:
    assert not succeeded(launch("run", steps=6, global_batch=-1, term=[0, 2]))
    own = tmp_path / "run" / "root" / PROGRAM.stem
    assert "set training.global_batch_size=4" in str(problem_with(own, 1))
    assert problem_with(own, 2) is None
    refused = launch("run", ranks=1, steps=6, global_batch=-1)
    assert refused.returncode != 0
    assert "set training.global_batch_size=4" in refused.stderr


def test_tensor_parallel_run_continues_with_fsdp(launch: Launch, tmp_path: Path) -> None:
    """Both ranks get the same samples at first, and then each its half of every step."""
    tensor = {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}}
    bare = {"manager": "torchtitan", "checkpoint": {"enable": False}}
    assert succeeded(launch("bare", steps=5, **tensor, **bare))
    assert not succeeded(launch("run", steps=5, **tensor, term=[0, 2]))
    stopped_after = max(record_of(tmp_path / "run", 0)[0])
    assert 2 <= stopped_after < 5
    assert succeeded(launch("run", steps=5))
    expected = record_of(tmp_path / "bare", 0)[0]
    first, second = (record_of(tmp_path / "run", rank)[0] for rank in range(2))
    for step in range(1, stopped_after + 1):
        assert first[step] == second[step] == expected[step]
    for step in range(stopped_after + 1, 6):
        both = [first[step], second[step]]
        assert sorted(both[0]["samples"] + both[1]["samples"]) == sorted(expected[step]["samples"])
        assert sum(one["tokens"] for one in both) == expected[step]["tokens"]
        loss = sum(one["loss"] for one in both)
        assert math.isclose(loss, expected[step]["loss"], rel_tol=LOSS_APART_MAX)


def test_pipeline_parallelism_is_refused(launch: Launch) -> None:
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
    refused = launch("run", steps=2, layers=2, parallelism=pipeline)
    assert refused.returncode != 0
    assert "parallelism.pipeline_parallel_degree=2: this manager does not" in refused.stderr


# --- beginnings and ends ------------------------------------------------------------------------


def test_error_saves_nothing_of_its_step(launch: Launch, tmp_path: Path) -> None:
    failed = launch("run", ranks=1, steps=4, fail=3)
    assert failed.returncode != 0
    assert "no such loss" in failed.stderr
    assert [one.name.split(".")[0] for one in checkpoints(tmp_path / "run")] == ["step-00000002"]
    assert succeeded(launch("run", ranks=1, steps=4))
    steps = [line["step"] for line in lines_of(tmp_path / "run", 0)]
    assert steps == [1, 2, 3, 3, 4]


def test_run_begins_with_a_checkpoint_of_torchtitan_and_exports_its_last_model(
    launch: Launch, tmp_path: Path
) -> None:
    """Another run then begins with its checkpoint, and a third one with its weights only."""
    own = {"interval": 2, "last_save_model_only": False, "enable": True}
    assert succeeded(launch("old", ranks=1, steps=3, manager="torchtitan", checkpoint=own))
    start = {
        "initial_load_path": str(tmp_path / "old" / "outputs" / "checkpoint" / "step-3"),
        "initial_load_model_only": False,
        "last_save_model_only": True,
    }
    assert succeeded(launch("run", ranks=1, steps=5, validates=True, checkpoint=start))
    assert sorted(record_of(tmp_path / "run", 0)[0]) == [4, 5]
    exported = tmp_path / "run" / "outputs" / "checkpoint" / "step-5" / ".metadata"
    assert b"layers.0.attention.qkv_linear.wq.weight" in exported.read_bytes()
    last = checkpoints(tmp_path / "run")[-1]
    more = {"initial_load_path": str(last), "initial_load_model_only": False}
    assert succeeded(launch("fork", ranks=1, steps=6, checkpoint=more))
    assert sorted(record_of(tmp_path / "fork", 0)[0]) == [6]
    assert succeeded(launch("fresh", ranks=1, steps=1))
    assert succeeded(launch("tuned", ranks=1, steps=1, checkpoint={"initial_load_path": str(last)}))
    fresh, tuned = (record_of(tmp_path / name, 0)[0][1] for name in ("fresh", "tuned"))
    assert fresh["samples"] == tuned["samples"]
    assert fresh["loss"] != tuned["loss"]


def test_stream_of_a_checkpoint_of_torchtitan_begins_afresh_only_if_asked(
    launch: Launch, tmp_path: Path
) -> None:
    settings = {"ranks": 1, "loader": "stream"}
    own = {"interval": 2, "last_save_model_only": False, "enable": True}
    assert succeeded(launch("old", **settings, steps=2, manager="torchtitan", checkpoint=own))
    first = tmp_path / "old" / "outputs" / "checkpoint" / "step-2"
    start = {"initial_load_path": str(first), "initial_load_model_only": False}
    refused = launch("run", **settings, steps=3, checkpoint=start)
    assert refused.returncode != 0
    assert 'exclude_from_loading=["dataloader"], the data begins at its start' in refused.stderr
    afresh = {**start, "exclude_from_loading": ["dataloader"]}
    assert succeeded(launch("run", **settings, steps=3, checkpoint=afresh))
    assert sorted(record_of(tmp_path / "run", 0)[0]) == [3]


def checkpoints(folder: Path) -> list[Path]:
    return RunPaths(folder / "root" / "torchtitan_program").list_checkpoints()


REFUSED: Final[dict[str, dict[str, Any]]] = {
    "holdfast fork": {"load_step": 3},
    "load_only=True: a run always saves": {"load_only": True},
    "pass its folder as initial_load_path": {"create_seed_checkpoint": True},
    "['dataloader', 'lr_scheduler', 'optimizer']": {"exclude_from_loading": ["train_state"]},
    "keep = { last = 5 } under [checkpoint]": {"keep_latest_k": 5},
    "every save is asynchronous": {"async_mode": "disabled"},
    "folder counts only with last_save_model_only": {"folder": "elsewhere"},
    "such as 'validation_metrics/loss min'": {"best": "validation_metrics/loss"},
    "expected last_save_model_only=True with it": {"export_dtype": "bfloat16"},
}


def ask(titan: Path, **settings: Any) -> Any:
    """Return what the program says about `settings`, in a single process."""
    ended = subprocess.run(
        [titan, PROGRAM, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=LAUNCH_S,
        check=True,
    )
    return json.loads(ended.stdout)


def test_keys_that_cannot_be_honoured_are_refused(titan: Path) -> None:
    """Each refusal names its key, and says what to do instead."""
    *errors, none = ask(titan, refused=[*REFUSED.values(), {}])
    assert none == ""
    for (advice, options), error in zip(REFUSED.items(), errors, strict=True):
        assert error.startswith(f"Trainer.Config.checkpoint: {next(iter(options))}=")
        assert advice in error


def test_loader_gives_each_sample_once_at_every_degree(titan: Path, tmp_path: Path) -> None:
    """A saved place continues at another degree. Documents end at the separator."""
    found = ask(titan, batches=str(make_data(tmp_path / "data")))
    tokens = np.load(tmp_path / "data" / "tokens.npy").tolist()
    every = sorted(tokens[at * SEQ_LEN : at * SEQ_LEN + 4] for at in range(SAMPLES))
    pair, alone = found["pair"], found["alone"]
    assert sorted(alone) == sorted(pair[0] + pair[1]) == every
    for at in range(0, SAMPLES, 4):
        both = [rows[at // 2 : at // 2 + 2] for rows in pair]
        assert alone[at : at + 4] == both[0] + both[1]
    assert found["with a worker"] == alone
    assert found["first of pair"] == pair[0][:4]
    assert found["continued alone"] == alone[8:]
    for row, positions, labels in zip(
        found["inputs"], found["positions"], found["labels"], strict=True
    ):
        ends = [token == found["separator"] for token in row]
        place = 0
        for at, token in enumerate(row[1:], 1):
            place = 0 if ends[at - 1] else place + 1
            assert positions[at] == place
            assert labels[at - 1] == (IGNORED if ends[at - 1] else token)
    assert found["separator"] in found["inputs"][0]


def test_stream_of_chats_continues_after_each_batch(titan: Path, tmp_path: Path) -> None:
    """Each token of an answer is given once. What does not fit waits for the next sequence."""
    found = ask(titan, chats=str(tmp_path))
    rows = [row for batch in found["whole"] for row in batch]
    assert {len(row[0]) for row in rows} == {len(row[1]) for row in rows} == {SEQ_LEN}
    labels = Counter(label for _, row in rows for label in row if label != IGNORED)
    assert labels == Counter(label for answer in found["labels"] for label in answer)


def test_example_trains_to_its_end(launch: Launch, tmp_path: Path) -> None:
    ended = launch("example", ranks=1, program=EXAMPLE / "train.py")
    assert ended.returncode == 0, ended.stderr[-6000:]
    last = read_manifest(RunPaths(tmp_path / "example" / "root" / "train").list_checkpoints()[-1])
    assert last is not None
    assert last.step == 40
    spec = RunSpec.model_validate(tomllib.loads((EXAMPLE / "spec.toml").read_text()))
    assert spec.command == ("examples/torchtitan/train.py",)
