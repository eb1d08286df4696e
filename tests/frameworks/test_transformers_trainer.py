"""Trainers of Holdfast in one process: their batch, their directories, and what they refuse."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.frameworks.transformers_program import Sentences, Settings, collate, make_trainer, train
from tests.support.loop_cases import Case
from tests.support.rank_programs import ROOT
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer import Session
from holdfast.trainer.frameworks.transformers import HoldfastCallback, Trainer, attach
from holdfast.trainer.frameworks.transformers.run import FILE, GivenBatch, agree_on_batch

# The samples of one epoch of three steps.
SMALL: Final[dict[str, Any]] = {"samples": 12}

Make = Callable[..., Case]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes cases whose run is in their folder. Trainers of one process have one case at a time."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_INTERVAL", "1000")
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_SNAPSHOTS", "off")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def make_case(name: str) -> Case:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(Trainer, "session_options", {"directory": folder / "run"})
        return Case(folder)

    yield make_case
    torch.set_num_threads(threads)


def trainer_of(case: Case, **arguments: Any) -> Any:
    return make_trainer(case, Settings(**SMALL), arguments)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"enable_jit_checkpoint": True}, "each rank save and stop alone"),
        ({"auto_find_batch_size": True}, "changes the batch during the run"),
        ({"fsdp": True}, "supports the second version on GPUs only"),
    ],
)
def test_arguments_that_exclude_a_resume_are_refused(
    arguments: dict[str, Any], problem: str, make: Make
) -> None:
    trainer = trainer_of(make("run"))
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    with pytest.raises(SpecError, match=problem):
        trainer.train()


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_policy_that_skips_data_is_refused(
    action: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_NUMERICS", json.dumps({"on_spike": action}))
    with pytest.raises(SpecError, match="Choose stop or warn"):
        trainer_of(make("run")).train()


class Stream(IterableDataset[dict[str, Any]]):
    """Sentences without an index."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        sentences = Sentences(12)
        return (sentences[index] for index in range(12))


def test_a_stream_that_names_no_shards_is_refused(make: Make) -> None:
    trainer = trainer_of(make("run"), max_steps=3)
    trainer.train_dataset = Stream()
    with pytest.raises(SpecError, match="the stream Stream names no shards"):
        trainer.train()


def test_a_second_training_in_one_program_is_refused(make: Make) -> None:
    trainer = trainer_of(make("run"), max_steps=1)
    trainer.train()
    with pytest.raises(SpecError, match="called twice"):
        trainer.train()


def test_trials_are_refused(make: Make) -> None:
    with pytest.raises(SpecError, match="submit a run for each trial"):
        trainer_of(make("run")).train(trial={"learning_rate": 0.1})


def test_a_callback_beside_the_class_is_refused(make: Make) -> None:
    case = make("run")
    with pytest.raises(SpecError, match="registered twice"):
        Trainer(
            model=trainer_of(case).model,
            train_dataset=Sentences(12),
            callbacks=[HoldfastCallback()],
        )


def test_two_callbacks_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(make("run"), Settings(kind="bare", **SMALL), {})
    with pytest.raises(SpecError, match="registered twice"):
        type(trainer)(
            model=trainer.model,
            args=trainer.args,
            train_dataset=Sentences(12),
            eval_dataset=Sentences(4),
            callbacks=[HoldfastCallback(), HoldfastCallback()],
        )


def test_a_callback_that_is_added_too_late_is_refused(make: Make) -> None:
    trainer = make_trainer(make("run"), Settings(kind="bare", **SMALL), {})
    trainer.add_callback(HoldfastCallback())
    with pytest.raises(SpecError, match=r"callbacks=\[HoldfastCallback\(\)\]"):
        trainer.train()


def test_only_a_trainer_can_be_attached() -> None:
    with pytest.raises(SpecError, match=r"expected a transformers.Trainer, not a dict"):
        attach({})


def test_a_checkpoint_of_a_plain_loop_is_refused(make: Make) -> None:
    case = make("run")
    bare = make_trainer(case, Settings(kind="bare", **SMALL), {})
    bare.create_optimizer_and_scheduler(6)
    directory = Trainer.session_options["directory"]
    with Session(bare.model, bare.optimizer, bare.lr_scheduler, directory=directory) as session:
        for _ in session.steps(1):
            batch = collate([bare.train_dataset[index] for index in range(4)])
            del batch["ids"]
            bare.model(**batch).loss.backward()
            bare.optimizer.step()
    with pytest.raises(CheckpointError, match="no state of a Transformers Trainer"):
        trainer_of(case).train()


def test_a_replaced_state_dict_without_all_weights_is_refused(make: Make) -> None:
    trainer = trainer_of(make("run"))
    # As scripts for LoRA do, so that the trainer saves only adapters.
    trainer.model.state_dict = lambda *_, **__: {}
    with pytest.raises(SpecError, match=r"model.state_dict was replaced .* Remove the replacement"):
        trainer.train()


# --- directories ------------------------------------------------------------------------------


@pytest.mark.more
def test_training_begins_with_a_directory_of_transformers(make: Make, tmp_path: Path) -> None:
    whole = make("whole")
    train(whole, kind="bare", num_train_epochs=1, **SMALL)
    path = str(whole.folder / "out" / "checkpoint-3")
    ends = {}
    for kind in ("bare", "class"):
        case = make(kind)
        train(case, kind=kind, resume=path, **SMALL)
        ends[kind] = case.notes(0)
    assert ends["class"] == ends["bare"]
    assert {"step 4", "step 6"} <= ends["class"].keys()
    saved = RunPaths(tmp_path / "class" / "run").list_checkpoints()
    assert [path.name for path in saved] == ["step-00000006.a0000.l01"]


def test_the_newest_directory_with_a_training_state_is_found(make: Make) -> None:
    case = make("run")
    train(case, kind="bare", num_train_epochs=1, **SMALL)
    exported = case.folder / "out" / "checkpoint-5"
    exported.mkdir()
    (exported / "trainer_state.json").write_text("{}")
    train(case, resume=True, **SMALL)
    assert case.notes(0)["end"]["step"] == 6
    assert [key for key, _ in case.lines("notes")].count("step 3") == 1


def test_without_a_directory_to_resume_from_the_error_is_the_trainers(make: Make) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer_of(make("run")).train(resume_from_checkpoint=True)


@pytest.mark.more
def test_directories_without_a_training_state_are_refused(make: Make) -> None:
    case = make("run")
    train(case, **SMALL)
    checkpoint = RunPaths(case.folder / "run").list_checkpoints()[-1]
    for path, problem in [
        (case.folder / "out" / "checkpoint-3", r"there is no scheduler.pt in it"),
        (case.folder, "there is no trainer_state.json and no scheduler.pt"),
        (checkpoint, "`holdfast fork`"),
    ]:
        with pytest.raises(SpecError, match=problem):
            trainer_of(make(f"another-{path.name}")).train(resume_from_checkpoint=str(path))


@pytest.mark.more
@pytest.mark.parametrize("name", ["checkpoint-6", None])
def test_a_directory_of_a_save_that_was_never_committed_counts_as_none(
    name: str | None, make: Make
) -> None:
    case = make("run")
    train(case, **SMALL)
    shutil.rmtree(case.folder / "run" / "checkpoints")
    # A program that finds a directory, as published examples do, passes its path or True.
    train(case, resume=str(case.folder / "out" / name) if name else True, **SMALL)
    assert [key for key, _ in case.lines("notes")].count("step 1") == 2
    assert case.notes(0)["end"]["step"] == 6


@pytest.mark.more
def test_a_dataset_that_was_made_in_another_way_is_reported(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    case = make("run")
    for steps, fingerprint in ((2, "b1"), (4, "b1"), (6, "c2")):
        trainer = trainer_of(case, max_steps=steps)
        trainer.train_dataset._fingerprint = fingerprint
        trainer.train()
        said = capsys.readouterr().out
        assert ("has the fingerprint c2, and b1 in the checkpoint" in said) is (steps == 6)


def test_a_path_counts_only_while_the_run_has_no_checkpoint(make: Make) -> None:
    case = make("run")
    train(case, max_steps=4, **SMALL)
    before = case.notes(0)["end"]
    train(case, max_steps=4, resume="/a/directory/that/is/gone", **SMALL)
    assert {**case.notes(0)["end"], "random": 0} == {**before, "random": 0}


class Directories(TrainerCallback):
    """Lists the trainer's directories whenever it has saved."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(sorted(path.name for path in Path(args.output_dir).iterdir()))


def test_older_directories_remain_until_a_resume_no_longer_needs_them(make: Make) -> None:
    trainer = trainer_of(make("run"), save_total_limit=1, num_train_epochs=3)
    listing = Directories()
    trainer.add_callback(listing)
    trainer.train()
    for earlier, later in zip(listing.seen, listing.seen[1:], strict=False):
        # The newest of the save before is only deleted after the commit of this save.
        assert earlier[-1] in later
    best = f"checkpoint-{trainer.state.best_global_step}"
    assert [path.name for path in Path(trainer.args.output_dir).iterdir()] == [best]


def test_a_directory_has_the_model_and_no_training_state(make: Make) -> None:
    trainer = trainer_of(make("run"), max_steps=3)
    trainer.train()
    names = {path.name for path in (Path(trainer.args.output_dir) / "checkpoint-3").iterdir()}
    assert {"config.json", "model.safetensors", "trainer_state.json"} <= names
    assert not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


# --- the global batch -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ((4, 1, 2), 2, (4, 1)),
        ((4, 1, 2), 1, (4, 2)),
        ((4, 1, 2), 4, (2, 1)),
        ((3, 2, 2), 1, (3, 4)),
        ((3, 2, 2), 4, (3, 1)),
        ((8, 1, 3), 2, (6, 2)),
    ],
)
def test_the_global_batch_stays_the_same(
    given: tuple[int, int, int], ranks: int, expected: tuple[int, int]
) -> None:
    first = GivenBatch(per_device=given[0], accumulation=given[1], world_size=given[2])
    batch = first.shared_by(ranks)
    assert (batch.per_device, batch.accumulation) == expected
    assert batch.total == first.total


def test_ranks_that_cannot_share_the_batch_are_refused() -> None:
    with pytest.raises(
        SpecError, match="does not split evenly over 3 ranks; run on 1, 2 or 4 ranks"
    ):
        GivenBatch(per_device=4, accumulation=1, world_size=2).shared_by(3)


def test_the_first_launch_is_noted_and_changed_arguments_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    first = GivenBatch(per_device=4, accumulation=1, world_size=2)
    assert agree_on_batch(first, folder) == first
    alone = agree_on_batch(GivenBatch(per_device=4, accumulation=1, world_size=1), folder)
    assert (alone.per_device, alone.accumulation) == (4, 2)
    assert json.loads((folder / FILE).read_bytes())["world_size"] == 2
    changed = GivenBatch(per_device=8, accumulation=1, world_size=1)
    assert agree_on_batch(changed, folder) == changed
    assert "the batch is now 8 per device times 1" in "".join(capfd.readouterr())


# --- the example ------------------------------------------------------------------------------


@pytest.mark.more
def test_the_example_trains_and_resumes(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("run")
    example = ROOT / "examples" / "transformers" / "train.py"
    command = tomllib.loads(example.with_name("spec.toml").read_text())["command"]
    small = ("--layers=1", "--width=16", "--text_bytes=40000", f"--output_dir={tmp_path / 'out'}")
    steps = ("--max_steps=4", "--eval_steps=2", "--save_steps=2", "--logging_steps=2")
    monkeypatch.setattr(sys, "argv", [str(example), *command[1:], *small, *steps])
    for _ in range(2):
        runpy.run_path(str(example), run_name="__main__")
    saved = RunPaths(tmp_path / "run" / "run").list_checkpoints()
    assert [path.name[:13] for path in saved] == ["step-00000002", "step-00000004"]
    assert (tmp_path / "out" / "model.safetensors").exists()
    changed = [line for line in example.read_text().splitlines() if "# + holdfast" in line]
    assert len(changed) == 1
