"""The order of Accelerate's loaders continues at any number of ranks. Folders of `save_state`."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset

from holdfast.contracts.disk.paths import MANIFEST
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.trainer.frameworks.accelerate.accelerator import Folders, read_link
from holdfast.trainer.frameworks.accelerate.loaders import Loader

SAMPLES: Final = 60
BATCH: Final = 4
BATCHES: Final = SAMPLES // BATCH
KINDS: Final[dict[str, dict[str, bool]]] = {
    "shuffled": {},
    "seedable": {"use_seedable_sampler": True},
    "stateful": {"use_stateful_dataloader": True},
}


@pytest.fixture(autouse=True)
def _state() -> None:
    PartialState(cpu=True)


def make(ranks: int, rank: int, seed: int, **kind: bool) -> Loader:
    """A rank's prepared loader, as `Accelerator.prepare` makes it."""
    torch.manual_seed(seed)
    dataset = TensorDataset(torch.arange(SAMPLES))
    prepared = prepare_data_loader(
        DataLoader(dataset, batch_size=BATCH, shuffle=True),
        num_processes=ranks,
        process_index=rank,
        **kind,
    )
    return Loader(prepared, 0, lambda loader, _: iter(loader.inner))


def give(loader: Loader, seed: int, count: int | None = None) -> list[list[int]]:
    """The next batches of a pass that begins after the global generator was seeded."""
    torch.manual_seed(seed)
    return [batch[0].tolist() for batch in islice(loader, count)]


def dealt(parts: list[list[list[int]]]) -> list[list[int]]:
    """The batches of all ranks in the order in which they are dealt out."""
    return list(chain.from_iterable(zip(*parts, strict=True)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("before", "steps", "after"),
    [(2, 3, 2), (2, 3, 1), (2, 3, 4), (4, 2, 2), (1, 5, 2), (1, 5, 1), (3, 1, 2)],
)
def test_the_rest_of_an_epoch_is_dealt_to_any_number_of_ranks(
    kind: str, before: int, steps: int, after: int
) -> None:
    whole = dealt([give(make(before, r, 1, **KINDS[kind]), 2) for r in range(before)])
    parts: list[list[list[int]]] = []
    saved: dict[str, Any] = {}
    for rank in reversed(range(before)):
        loader = make(before, rank, 1, **KINDS[kind])
        parts.insert(0, give(loader, 2, steps))
        saved = loader.describe(done=steps * loader.unit, is_ending=False)
    rest = []
    for rank in range(after):
        loader = make(after, rank, 77, **KINDS[kind])
        loader.restore(saved)
        assert loader.resumed is not None
        loader.start_at(loader.start_of(loader.resumed))
        rest.append(give(loader, 78))
    found = dealt(parts) + dealt(rest)
    assert found[:BATCHES] == whole[:BATCHES]
    assert sorted(chain.from_iterable(found[:BATCHES])) == list(range(SAMPLES))


def test_the_order_of_the_next_epoch_continues_from_two_ranks_on() -> None:
    loader = make(2, 0, 1)
    give(loader, 2)
    saved = loader.describe(done=0, is_ending=False)
    following = give(loader, 3)
    resumed = make(2, 0, 77)
    resumed.restore(saved)
    assert resumed.resumed is None
    assert give(resumed, 78) == following


def test_the_generators_are_those_of_the_resume_after_an_order_was_put_back() -> None:
    loader = make(1, 0, 1)
    give(loader, 2, 3)
    saved = loader.describe(done=3, is_ending=False)
    resumed = make(1, 0, 77)
    resumed.restore(saved)
    assert resumed.resumed is not None
    torch.manual_seed(5)
    resumed.start_at(resumed.start_of(resumed.resumed))
    next(iter(resumed))
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())


@pytest.mark.parametrize("rank", [0, 1])
def test_uneven_numbers_of_batches_are_a_problem_on_every_rank(rank: int) -> None:
    problem = make(2, rank, 1, even_batches=False).problem
    assert problem is not None
    assert problem.startswith("a loader with even_batches=False, whose 15 batches do not divide by")
    assert make(3, rank, 1, even_batches=False).problem is None


def test_another_dataset_is_refused() -> None:
    loader = make(1, 0, 1)
    saved = {**loader.describe(done=0, is_ending=False), "samples": SAMPLES + 1}
    with pytest.raises(CheckpointError, match="had 61 samples and now has 60"):
        loader.restore(saved)


class Saved:
    """The part of a session that folders use: a run `run` with one checkpoint per step."""

    def __init__(self, folder: Path) -> None:
        self.run_directory = folder / "run"
        self.current_checkpoint: str | None = None
        self.kept: list[tuple[str, Path]] = []

    def stage(self, step: int) -> Path:
        name = f"step-{step:08d}.a0001.l01"
        self.current_checkpoint = f"run:{name}"
        directory = self.run_directory / "checkpoints" / name
        directory.mkdir(parents=True)
        return directory

    def keep_while_there(self, checkpoint: str, path: Path) -> None:
        self.kept.append((checkpoint, path))


def numbered(folder: Path, limit: int | None) -> Any:
    return SimpleNamespace(
        automatic_checkpoint_naming=True, project_dir=folder, total_limit=limit, iteration=0
    )


def test_a_limit_of_one_keeps_the_old_folder_until_the_new_checkpoint_is_committed(
    tmp_path: Path,
) -> None:
    configuration, session = numbered(tmp_path, 1), Saved(tmp_path)
    folders = Folders(configuration, is_main=True)
    saves = []
    for step in (1, 2):
        folder = folders.for_save(None, "run")
        folders.want(folder)
        saves.append(session.stage(step))
        folders.look(session)  # type: ignore[arg-type]
        configuration.iteration += 1
    first, second = (tmp_path / "checkpoints" / f"checkpoint_{n}" for n in range(2))
    assert first.exists()
    assert second.exists()
    (saves[1] / MANIFEST).touch()
    folders.look(session)  # type: ignore[arg-type]
    assert not first.exists()
    link = read_link(second)
    assert link is not None
    assert link.directory == saves[1]
    assert [path for _, path in session.kept] == [first, second]


def test_a_folder_waits_for_the_checkpoint_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    session, folders = Saved(tmp_path), Folders(numbered(tmp_path, None), is_main=True)
    folder = folders.for_save(None, "run")
    folders.want(folder)
    folders.look(session)  # type: ignore[arg-type]
    assert read_link(folder) is None
    session.stage(4)
    folders.look(session)  # type: ignore[arg-type]
    link = read_link(folder)
    assert link is not None
    assert link.checkpoint == session.current_checkpoint


def test_a_crashed_launch_may_write_its_folder_again_and_another_run_may_not(
    tmp_path: Path,
) -> None:
    session, folders = Saved(tmp_path), Folders(numbered(tmp_path, None), is_main=True)
    folder = folders.for_save(None, "run")
    folders.want(folder)
    session.stage(1)
    folders.look(session)  # type: ignore[arg-type]
    assert folders.for_save(None, "run") == folder
    with pytest.raises(SpecError, match="already exists and is not a save of run other"):
        folders.for_save(None, "other")
