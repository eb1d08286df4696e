"""The model's files of a `Trainer`: as the library writes them, in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.frameworks.test_transformers_trainer import make, trainer_of  # noqa: F401
from tests.support.loop_cases import Case
from transformers import Trainer as Bare
from transformers import TrainerCallback

from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.frameworks.transformers import Trainer
from holdfast.trainer.frameworks.transformers.run import in_background, safetensors_writer

MODEL: Final = "model.safetensors"

Make = Callable[..., Case]


class Recorder:
    """In place of a session: notes the paths that are written in the background."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def write_file(self, path: Path, write: Any) -> None:
        self.paths.append(path)
        with path.open("wb") as file:
            write(file)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that a session was asked to write in the background."""
    paths: list[Path] = []
    write_file = FrameworkSession.write_file

    def note(session: FrameworkSession, path: Path, write: Any) -> None:
        paths.append(path)
        write_file(session, path, write)

    monkeypatch.setattr(FrameworkSession, "write_file", note)
    return paths


class Reading(TrainerCallback):
    """Reads the model whenever it has been saved."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(
            load_file(Path(args.output_dir) / f"checkpoint-{state.global_step}" / MODEL)
        )


class ReadingTrainer(Trainer):
    """Reads the model in a save of its own."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        load_file(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}" / MODEL)


def test_a_file_is_equal_to_that_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "ä.weight": torch.randn(3, 5),
        "half": torch.randn(7).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "frozen": torch.nn.Parameter(torch.randn(2, 2), requires_grad=False),
    }
    metadata = {"format": "pt"}
    save_file(tensors, tmp_path / "library", metadata=metadata)
    with (tmp_path / "ours").open("wb") as file:
        safetensors_writer(tensors, metadata)(file)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_only_plain_tensors_of_the_directory_are_taken_from_the_library(tmp_path: Path) -> None:
    import safetensors.torch

    inside, elsewhere = tmp_path / "inside", tmp_path / "elsewhere"
    inside.mkdir()
    elsewhere.mkdir()
    whole = torch.arange(6.0)
    recorder: Any = Recorder()
    with in_background(recorder, inside):
        safetensors.torch.save_file({"whole": whole}, inside / MODEL)
        safetensors.torch.save_file({"whole": whole}, elsewhere / MODEL)
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors.torch.save_file({"whole": whole, "same": whole}, inside / "shared")
    assert recorder.paths == [inside / MODEL]
    assert safetensors.torch.save_file is save_file
    for folder in (inside, elsewhere):
        assert torch.equal(load_file(folder / MODEL)["whole"], whole)


def test_the_models_files_are_written_in_the_background(
    make: Make,  # noqa: F811
    staged: list[Path],
) -> None:
    trainer = trainer_of(make("run"), save_total_limit=None)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    assert staged == [folder / f"checkpoint-{step}" / MODEL for step in (3, 6)]
    # The end of the training loaded the best one.
    best = load_file(staged[trainer.state.best_global_step // 3 - 1])
    state = trainer.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in best.items())


@pytest.mark.more
def test_a_reader_finds_the_file_that_was_just_saved(
    make: Make,  # noqa: F811
    staged: list[Path],
) -> None:
    trainer = trainer_of(make("callback"))
    reading = Reading()
    trainer.add_callback(reading)
    trainer.train()
    assert len(reading.seen) == 2
    trainer = trainer_of(make("subclass"))
    trainer.__class__ = ReadingTrainer
    trainer.train()
    assert staged == []
    assert issubclass(ReadingTrainer, Bare)
