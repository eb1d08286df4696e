"""The place of a program in its loaders, without a session: passes, their ends and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from lightning.fabric.wrappers import _FabricDataLoader
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.trainer.frameworks.lightning.fabric_drop_in import FabricLoader, FabricProgress
from holdfast.trainer.frameworks.program_loop.progress import RankProgress

BATCHES: Final = 4


class Program:
    """A program's progress, whose loaders report to it as a training's do."""

    def __init__(self) -> None:
        fabric = SimpleNamespace(device=torch.device("cpu"), world_size=1, global_rank=0)
        self.progress = FabricProgress(fabric)

    def loader(self) -> FabricLoader:
        inner = _FabricDataLoader(DataLoader(TensorDataset(torch.arange(BATCHES)), shuffle=True))
        made = FabricLoader(inner, len(self.progress.loaders), self.iterate)
        self.progress.add(made)
        return made

    def iterate(self, loader: Any, skip: int) -> Iterator[Any]:
        one = self.progress.begin(loader, 0)
        try:
            for batch in loader.inner:
                one.done += 1
                yield batch
                if self.progress.ends_step(one):
                    self.progress.close_step()
        finally:
            self.progress.end(one)

    def train(self, loader: FabricLoader) -> None:
        for _ in loader:
            self.progress.note_step()

    def resumed(self, *loaders: FabricLoader) -> Program:
        """A program that resumes from this one's state, with the same loaders."""
        other = Program()
        for _ in loaders:
            other.loader()
        mine = RankProgress(self.progress).state_dict()
        other.progress.load_state_dict(self.progress.state_dict())
        RankProgress(other.progress).load_state_dict(mine)
        return other


@pytest.fixture
def program() -> Program:
    torch.manual_seed(3)
    made = Program()
    made.progress.begin_loop()
    return made


def draw() -> float:
    return float(torch.rand(()))


def test_the_first_batch_of_a_complete_pass_is_the_number_of_its_batches(program: Program) -> None:
    loader = program.loader()
    program.train(loader)
    resumed = program.resumed(loader)
    progress, (same,) = resumed.progress, resumed.progress.loaders
    assert progress.first_batch == BATCHES
    left_out = progress.leave_out(same, {})
    # A program that asks by `next` looks at the number after it created the iterator.
    assert progress.first_batch == BATCHES
    assert list(left_out) == []
    assert progress.first_batch == 0


def test_draws_between_two_passes_are_those_of_the_first_time(program: Program) -> None:
    first, second = program.loader(), program.loader()
    program.train(first)
    between = draw()
    batches = iter(second)
    next(batches)
    program.progress.note_step()
    assert not program.progress.close_step()
    resumed = program.resumed(first, second)
    left_out, continued = resumed.progress.loaders
    torch.manual_seed(99)
    resumed.progress.leave_out(left_out, {})
    assert draw() == between
    assert continued.resumed is not None
    assert continued.resumed.done == 1


def test_a_program_that_asks_by_next_evaluates_after_its_last_step(program: Program) -> None:
    loader = program.loader()
    batches = iter(loader)
    for _ in range(BATCHES):
        next(batches)
        program.progress.note_step()
    program.progress.note_new_pass()
    evaluated = draw()
    assert program.progress.close_step()
    resumed = program.resumed(loader)
    torch.manual_seed(99)
    resumed.progress.leave_out(resumed.progress.loaders[0], {})
    assert draw() == evaluated


def test_loaders_that_are_made_in_an_epoch_end_with_it(program: Program) -> None:
    kept = program.loader()
    program.progress.begin_loop()
    for _ in range(2):
        made = program.loader()
        assert made.number == 1
        assert made.passes == 0
        program.train(made)
        assert made.passes == 1
        program.progress.next_epoch()
    assert program.progress.loaders == [kept]


def test_a_pass_that_outlives_its_epoch_is_not_one_of_the_next(program: Program) -> None:
    loader = program.loader()
    program.progress.begin_loop()
    batches = iter(loader)
    next(batches)
    program.progress.note_step()
    assert not program.progress.close_step()
    program.progress.next_epoch()
    batches.close()  # type: ignore[attr-defined]
    assert loader.passes == 0


def orders(loader: FabricLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader.inner]


@pytest.mark.more
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_continues_its_order_and_has_the_same_next_one(kind: Any, workers: int) -> None:
    def make(seed: int) -> FabricLoader:
        torch.manual_seed(seed)
        dataset = TensorDataset(torch.arange(20))
        inner = kind(dataset, batch_size=2, shuffle=True, num_workers=workers)
        return FabricLoader(_FabricDataLoader(inner), 0, lambda loader, _: iter(loader.inner))

    whole = make(1)
    expected, following = orders(whole), orders(whole)
    cut = make(1)
    batches = iter(cut)
    trained = [next(batches)[0].tolist() for _ in range(3)]
    generators = torch.get_rng_state()
    shared = cut.describe(done=3, is_ending=False, is_under_way=True)
    resumed = make(77)
    resumed.restore(shared)
    resumed.restore_rank(cut.describe_rank(is_training=True))
    assert resumed.resumed is not None
    torch.set_rng_state(generators)
    resumed.start_at(resumed.start_of(resumed.resumed))
    assert trained + orders(resumed) == expected
    assert orders(resumed) == following
