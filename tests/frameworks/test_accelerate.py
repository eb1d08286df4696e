"""Accelerate: programs that are killed, stopped and resized train like uninterrupted ones."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
from tests.process.local_runs import LocalRun, send
from tests.support.rank_programs import ROOT, run_program

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events
from holdfast.contracts.states import AttemptState

PROGRAM: Final = Path(__file__).with_name("accelerate_program.py")
EXAMPLE: Final = ROOT / "examples" / "accelerate" / "train.py"
LAUNCHES_S: Final = 300.0
EPOCHS: Final = 2
SAMPLES: Final = 60
KILLED: Final = -signal.SIGKILL
Line = dict[str, Any]
Lines = dict[str, Line]

# Two batches are one step. The dataset draws random numbers when it fetches a sample.
NOISY: Final[Line] = {"noise": True, "accumulate": 2, "scaler": True, "interval": 3}
STATEFUL: Final[Line] = {
    "interval": 4,
    "data": {"use_stateful_dataloader": True, "use_seedable_sampler": True},
}
SPLIT: Final[Line] = {"data": {"split_batches": True, "use_seedable_sampler": True}}


class Runs:
    """Runs of `accelerate_program` in one folder. One process runs what was added since the last
    `launch`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._launches: list[list[Any]] = []
        self._names: list[str] = []
        self.statuses: dict[str, list[list[int]]] = {}
        # All that the launches printed.
        self.said = ""

    def add(self, name: str, *ranks: int, **settings: Any) -> None:
        """Add a launch of the run `name` for each number of ranks, with identical settings."""
        full = {
            "epochs": EPOCHS,
            "output": str(self.folder / name / "out"),
            **settings,
            "session": {"directory": str(self.folder / name)},
        }
        self._launches += [[number, full] for number in ranks]
        self._names += [name] * len(ranks)

    def add_example(self, name: str, ranks: int, *, stops: bool = False) -> None:
        """Add a launch of the example. With `stops`, it is stopped after its first commit."""
        settings = {
            "script": str(EXAMPLE),
            "arguments": ["--cpu", "--epochs", "8"],
            "root": str(self.folder / name),
            "stops": stops,
        }
        self._launches.append([ranks, settings])
        self._names.append(name)

    def launch(self) -> None:
        """Run all launches, and note the exit statuses of their ranks."""
        said = run_program(
            "frameworks.accelerate_cases", json.dumps(self._launches), timeout_s=LAUNCHES_S
        )
        self.said += said
        found = json.loads(said.splitlines()[-1])
        for name, statuses in zip(self._names, found, strict=True):
            self.statuses.setdefault(name, []).append(statuses)
        self._launches, self._names = [], []

    def paths(self, name: str) -> RunPaths:
        return RunPaths(self.folder / name)

    def lines(self, name: str, rank: int = 0) -> Lines:
        return lines_of(self.folder / name, rank)


def lines_of(directory: Path, rank: int = 0) -> Lines:
    """A rank's last line of each batch, by its epoch and number in the epoch."""
    text = (directory / "records" / f"rank{rank}.jsonl").read_text()
    return {json.dumps(line["key"]): line for line in map(json.loads, text.splitlines())}


def ids(lines: Lines, epoch: int | None = None) -> dict[str, list[int]]:
    """The samples of each batch, of all epochs or of one."""
    return {
        key: line["ids"]
        for key, line in lines.items()
        if "ids" in line and epoch in {None, line["key"][0]}
    }


def checkpoints(run: RunPaths) -> list[Manifest]:
    """The manifests of a run's checkpoints, each of which is undamaged."""
    found = []
    for directory in run.list_checkpoints():
        manifest = read_manifest(directory)
        if manifest is not None:
            assert not find_damage(directory, manifest)
            found.append(manifest)
    return found


def linked(folder: Path) -> Path:
    return Path(json.loads((folder / "holdfast.json").read_text())["directory"])


def add_interrupted(made: Runs) -> None:
    made.add("cut", 2, 2, 2, **NOISY, kill_at=4, stop_at=7)
    # An epoch has four steps, so its evaluation runs in the second launch.
    made.add("ended", 2, 2, **NOISY, stop_at=4)
    made.add("split", 2, **SPLIT)
    made.add("split_resized", 2, 1, **SPLIT, stop_at=5)


def add_others(made: Runs) -> None:
    made.add("whole", 2, **NOISY)
    made.add("stateful", 2, **STATEFUL)
    made.add("stateful_cut", 2, 2, 2, **STATEFUL, kill_at=9, stop_at=12)
    made.add("sharded_resized", 2, 1, **SPLIT, fsdp=True, stop_at=5)
    made.add("resized", 2, 1, stop_at=3)
    made.add("local_sgd", 2, local_sgd=True)
    made.add("power_sgd", 2, epochs=1, power_sgd=True)
    made.add_example("example", 2)
    made.add_example("example_cut", 2, stops=True)
    made.add_example("example_cut", 2)


def add_folders(made: Runs) -> None:
    project = {
        "project_dir": str(made.folder / "project"),
        "automatic_checkpoint_naming": True,
        "total_limit": 2,
    }
    made.add("named", 2, 2, save_every=3, interval=4, kill_at=11, project=project)
    made.add("source", 1, save_every=4)
    source = made.folder / "source" / "out" / "step_12"
    made.add("continued", 1, load=str(source), start=[0, 12])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that were killed, stopped and resized, and that have folders of Accelerate."""
    made = Runs(tmp_path_factory.mktemp("accelerate"))
    add_interrupted(made)
    add_folders(made)
    made.launch()
    return made


@pytest.fixture(scope="module")
def all_runs(runs: Runs) -> Runs:
    """More runs beside them."""
    add_others(runs)
    runs.launch()
    return runs


@pytest.mark.more
@pytest.mark.parametrize(("whole", "cut"), [("whole", "cut"), ("stateful", "stateful_cut")])
def test_a_killed_and_stopped_run_equals_an_uninterrupted_one(
    all_runs: Runs, whole: str, cut: str
) -> None:
    killed, stopped, ended = all_runs.statuses[cut]
    assert KILLED in killed
    assert stopped == ended == [0, 0]
    for rank in range(2):
        assert all_runs.lines(cut, rank) == all_runs.lines(whole, rank)
    assert len({manifest.step for manifest in checkpoints(all_runs.paths(cut))}) > 1


@pytest.mark.more
def test_the_scale_of_a_grad_scaler_continues(all_runs: Runs) -> None:
    scales = [line["scale"] for line in all_runs.lines("cut").values() if "scale" in line]
    assert scales == [line["scale"] for line in all_runs.lines("whole").values() if "scale" in line]
    assert scales[-1] > scales[0] == 4.0


@pytest.mark.more
def test_each_sample_is_trained_on_once_per_epoch(runs: Runs) -> None:
    check_samples(runs, "cut")


@pytest.mark.more
def test_each_sample_of_a_stateful_loader_is_trained_on_once_per_epoch(all_runs: Runs) -> None:
    check_samples(all_runs, "stateful_cut")


def check_samples(runs: Runs, name: str) -> None:
    for epoch in range(EPOCHS):
        parts = [ids(runs.lines(name, rank), epoch) for rank in range(2)]
        batches = [batch for part in parts for batch in part.values()]
        trained = [sample for batch in batches for sample in batch]
        # 15 batches for 2 ranks: Accelerate fills up the last one with the first samples.
        assert sorted(set(trained)) == list(range(SAMPLES))
        assert len(trained) == SAMPLES + 4


@pytest.mark.more
def test_split_batches_give_one_rank_the_samples_of_two(runs: Runs) -> None:
    check_resized(runs, "split_resized")


@pytest.mark.more
def test_split_batches_of_a_sharded_run_give_one_rank_the_samples_of_two(all_runs: Runs) -> None:
    check_resized(all_runs, "sharded_resized")


def check_resized(runs: Runs, name: str) -> None:
    assert runs.statuses[name] == [[0, 0], [0]]
    whole = [runs.lines("split", rank) for rank in range(2)]
    resized = [runs.lines(name, rank) for rank in range(2)]
    assert resized[0].keys() == whole[0].keys()
    assert {line["ranks"] for line in resized[0].values()} == {1, 2}
    for key, first in ids(whole[0]).items():
        second = resized[1][key]["ids"] if resized[0][key]["ranks"] == 2 else []
        assert resized[0][key]["ids"] + second == first + whole[1][key]["ids"]
        assert resized[0][key]["lr"] == whole[0][key]["lr"]


@pytest.mark.more
def test_one_rank_trains_on_the_rest_of_the_epoch(all_runs: Runs) -> None:
    first, second = (ids(all_runs.lines("resized", rank), 0) for rank in range(2))
    ranks = {key: line["ranks"] for key, line in all_runs.lines("resized").items()}
    trained = [sample for batch in first.values() for sample in batch]
    trained += [sample for key, batch in second.items() if key in ranks for sample in batch]
    assert sorted(trained) == list(range(SAMPLES))
    assert len(second) < len(first)


@pytest.mark.more
def test_numbered_folders_go_on_after_a_kill_and_link_to_committed_checkpoints(runs: Runs) -> None:
    folders = sorted((runs.folder / "project" / "checkpoints").iterdir())
    # 8 batches per epoch and rank, and a save after every third of 16.
    assert [folder.name for folder in folders] == ["checkpoint_3", "checkpoint_4"]
    steps = [read_manifest(linked(folder)) for folder in folders]
    assert [manifest.step for manifest in steps if manifest is not None] == [12, 15]
    exported = [e for e in load_events(runs.paths("named")) if e.kind is EventKind.EXPORTED]
    assert {str(event.data["path"]) for event in exported} > set(map(str, folders))


@pytest.mark.more
def test_steps_without_synchronized_gradients_end_the_program(all_runs: Runs) -> None:
    assert 0 not in all_runs.statuses["local_sgd"][0]
    assert not checkpoints(all_runs.paths("local_sgd"))


@pytest.mark.more
def test_a_hook_whose_state_is_lost_is_reported_once(all_runs: Runs) -> None:
    assert all_runs.statuses["power_sgd"] == [[0, 0]]
    assert all_runs.said.count("the PowerSGDState of DDP's communication hook") == 1


@pytest.mark.more
def test_a_run_that_starts_from_a_folder_continues_at_its_place(runs: Runs) -> None:
    assert runs.statuses["continued"] == [[0]]
    source, continued = runs.lines("source"), runs.lines("continued")
    trained = ids(continued)
    assert next(iter(trained)) == "[0, 12]"
    for key in trained:
        assert continued[key] == source[key]
    manifests = checkpoints(runs.paths("continued"))
    assert manifests[-1].parent == f"source:{linked_name(runs)}"


def linked_name(runs: Runs) -> str:
    return linked(runs.folder / "source" / "out" / "step_12").name


def metrics(run: RunPaths, name: str) -> dict[int, float]:
    """The values of a metric that all launches logged, by step."""
    lines = chain.from_iterable(path.open() for path in sorted(run.directory.glob("metrics/*")))
    found = [json.loads(line) for line in lines]
    return {line["step"]: line[name] for line in found if name in line}


def resumed_at(run: RunPaths) -> list[int]:
    """The complete steps that each launch resumed with."""
    events, _ = read_journal(run.attempt(0).rank_journal)
    return [event.data["step"] for event in events if event.kind is EventKind.RESUMED]


@pytest.mark.more
def test_an_evaluation_after_a_stop_is_of_its_own_epochs_last_step(all_runs: Runs) -> None:
    whole, ended = all_runs.paths("whole"), all_runs.paths("ended")
    assert resumed_at(ended) == [0, 4]
    assert metrics(ended, "total") == metrics(whole, "total")
    assert list(metrics(whole, "total")) == [4, 8]
    for rank in range(2):
        assert all_runs.lines("ended", rank) == all_runs.lines("whole", rank)


@pytest.mark.more
def test_the_example_that_was_stopped_has_the_accuracies_of_a_whole_run(all_runs: Runs) -> None:
    folders = (all_runs.folder / name for name in ("example", "example_cut"))
    whole, cut = (RunPaths(next(folder.iterdir())) for folder in folders)
    assert all_runs.statuses["example_cut"] == [[0, 0], [0, 0]]
    first, second = resumed_at(cut)
    assert first == 0 < second
    assert metrics(cut, "accuracy") == metrics(whole, "accuracy")
    assert len(metrics(whole, "accuracy")) == 8


@pytest.fixture
def preempted(tmp_path: Path) -> Iterator[LocalRun]:
    """A run on the local executor, whose rank 0 kills itself once."""
    one = LocalRun(
        tmp_path / "runs",
        program=PROGRAM,
        epochs=EPOCHS,
        output=str(tmp_path / "out"),
        hurry=str(tmp_path / "hurry"),
        sleep_s=0.3,
        kill_at=4,
        checkpoint={"interval": 2},
        **SPLIT,
    )
    yield one
    one.end_all()


@pytest.mark.slow
def test_a_sharded_run_that_was_killed_and_stopped_equals_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    made = Runs(tmp_path)
    made.add("whole", 2, **NOISY, fsdp=True)
    made.add("cut", 2, 2, 2, **NOISY, fsdp=True, kill_at=4, stop_at=7)
    made.launch()
    assert KILLED in made.statuses["cut"][0]
    for rank in range(2):
        assert made.lines("cut", rank) == made.lines("whole", rank)


@pytest.mark.more
def test_a_killed_and_preempted_job_finishes_on_one_rank(
    preempted: LocalRun, runs: Runs, tmp_path: Path
) -> None:
    first = preempted.submit()
    preempted.wait_for_step(first, 6)
    send(preempted.claim(first).pid, signal.SIGTERM)
    assert preempted.wait_for_end().state is AttemptState.PREEMPTED
    (tmp_path / "hurry").touch()
    preempted.submit(gpus=1)
    assert preempted.wait_for_end().state is AttemptState.COMPLETED
    resumed = [event.data["step"] for event in preempted.events(EventKind.RESUMED)]
    assert resumed[0] == 0
    assert 0 < resumed[1] < 4 <= resumed[2]
    found = [lines_of(preempted.paths.directory, rank) for rank in range(2)]
    expected = [ids(runs.lines("split", rank)) for rank in range(2)]
    assert found[0].keys() == runs.lines("split").keys()
    for key in expected[0]:
        second = found[1][key]["ids"] if found[0][key]["ranks"] == 2 else []
        assert found[0][key]["ids"] + second == expected[0][key] + expected[1][key]


@pytest.mark.more
def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    said = run_program("frameworks.accelerate_refusals", str(tmp_path), timeout_s=LAUNCHES_S)
    found = json.loads(said.splitlines()[-1])
    expected = {
        "loop_over_a_range": "SpecError: an optimizer step outside of a loop over accelerator.ep",
        "unprepared_loader": "SpecError: an optimizer step outside of a loop over a prepared load",
        "loader_without_length": "SpecError: an optimizer step in a loop over a loader over Stream",
        "loader_of_rank_0": "SpecError: an optimizer step in a loop over a loader with dispatch_",
        "nothing_prepared": "SpecError: 0 models and 0 optimizers are prepared",
        "optimizer_prepared_late": "SpecError: SGD is prepared after the run has resumed",
        "two_accelerators": "SessionError: this process already has a Session",
        "second_loop": "SpecError: a second training in this program: its loop over accelerator.",
        "training_after_free_memory": "SpecError: a second training in this program",
        "second_accelerator_after_the_first": "SpecError: a second training in this program",
        "step_without_synchronized_gradients": "SpecError: a step of SGD while the gradients of",
        "hook_registered_twice": "SpecError: the hook hook is registered twice",
        "checkpoint_of_another_program": "CheckpointError: other:step-00000001.a0000.l01 was not",
        "another_dataset": "CheckpointError: extra.accelerate: AccelerateProgress.load_state_di",
        "folder_of_another_framework": f"CheckpointError: {tmp_path}/strange: neither a save of",
        "missing_folder": f"CheckpointError: load_state: {tmp_path}/missing has no checkpoint",
        "link_of_a_newer_version": f"CheckpointError: {tmp_path}/newer/holdfast.json has format 2",
        "link_to_nothing": f"CheckpointError: {tmp_path}/gone links to x:step-00000001.a0001.l01",
        "link_to_an_uncommitted_save": f"CheckpointError: {tmp_path}/torn links to torn_run:step-",
        "load_state_in_the_loop": f"SpecError: load_state('{tmp_path}') inside of the loop",
        "numbered_folder_of_something_else": f"SpecError: {tmp_path}/project/checkpoints/checkpoi",
    }
    assert {name: found[name][: len(text)] for name, text in expected.items()} == expected
    assert found.keys() == expected.keys()
