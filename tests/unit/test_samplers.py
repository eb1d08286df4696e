"""Samplers in torch and torchdata loaders: one order at every world size, no sample twice."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.contracts.errors import SpecError
from holdfast.trainer.data import order as data_order
from holdfast.trainer.data.order import DataOrder, SkipWindow
from holdfast.trainer.data.position import Position

SAMPLES = 50
GLOBAL_BATCH = 12
TOTAL = 11


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return SAMPLES


class Run:
    """The position of one rank, and the steps that it completed."""

    def __init__(self, rank: int = 0, world_size: int = 1, step: int = 0, **more: Any) -> None:
        self.position = Position(
            rank=rank,
            world_size=world_size,
            seed=3,
            skips=more.get("skips", ()),
            former=more.get("former", {}),
            completed=step,
            begins=more.get("begins"),
        )

    @property
    def step(self) -> int:
        return self.position.completed

    def train(self, batches: Any, steps: int | None = None) -> list[list[int]]:
        """Complete a step for each batch."""
        seen = []
        for batch in islice(batches, steps):
            seen.append(batch.tolist())
            self.position.completed += 1
        return seen


def full_order(first: int = 1) -> list[list[int]]:
    run = Run()
    order = run.position.order(SAMPLES, GLOBAL_BATCH)
    return [order.step_ids(step).tolist() for step in range(first, TOTAL + 1)]


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    return [[i for share in step for i in share] for step in zip(*ranks, strict=True)]


LOADERS: list[Any] = [
    lambda sampler: DataLoader(Numbers(), batch_sampler=sampler),
    lambda sampler: StatefulDataLoader(Numbers(), batch_sampler=sampler),
    lambda sampler: StatefulDataLoader(
        Numbers(), batch_sampler=sampler, num_workers=2, prefetch_factor=3
    ),
]


@pytest.mark.parametrize("load", LOADERS)
def test_prefetched_batches_are_neither_lost_nor_repeated(load: Any) -> None:
    stopped_at, seen = 4, []
    for rank in range(2):
        run = Run(rank, 2)
        batches = load(run.position.sampler(SAMPLES, GLOBAL_BATCH, TOTAL))
        seen.append(run.train(batches, stopped_at))
    resumed = []
    for rank in range(3):
        run = Run(rank, 3, step=stopped_at)
        batches = load(run.position.sampler(SAMPLES, GLOBAL_BATCH, TOTAL))
        assert len(batches) == TOTAL - stopped_at
        resumed.append(run.train(batches))
    assert together(seen) + together(resumed) == full_order()


def test_a_second_iteration_starts_after_the_last_completed_step() -> None:
    run = Run()
    loader = LOADERS[0](run.position.sampler(SAMPLES, GLOBAL_BATCH, TOTAL))
    assert run.train(loader, 3) + run.train(loader) == full_order()


@pytest.mark.parametrize("batch_size", [6, 3])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_distributed_sampler_gives_the_same_order(kind: Any, batch_size: int) -> None:
    ranks = []
    parts = 6 // batch_size
    for rank in range(2):
        run = Run(rank, 2)
        sampler = run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, batch_size)
        loader = kind(Numbers(), batch_size=batch_size, sampler=sampler)
        steps: list[list[int]] = []
        while run.step < TOTAL:
            sampler.set_epoch(run.position.epoch)
            assert len(loader) == len(sampler) // batch_size
            batches = iter(loader)
            for first in batches:
                rest = [next(batches).tolist() for _ in range(parts - 1)]
                steps.append([*first.tolist(), *(i for part in rest for i in part)])
                run.position.completed += 1
        ranks.append(steps[:TOTAL])
    assert together(ranks) == full_order()


def test_an_epoch_resumed_in_the_middle_continues_there() -> None:
    run = Run(step=2)
    sampler = run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None)
    # Steps 1 to 5 start in epoch 0: 50 samples are a little more than four steps.
    assert len(sampler) == 3 * GLOBAL_BATCH
    assert list(sampler) == [i for step in full_order(3)[:3] for i in step]


@pytest.mark.parametrize(
    ("step", "open_epoch", "reported"), [(5, None, True), (4, None, False), (5, 0, False)]
)
def test_a_resume_at_an_epoch_end_without_session_epochs_is_reported(
    step: int, open_epoch: int | None, reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(step=step, begins=lambda: None)
    run.position.open_epoch = open_epoch
    list(run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None))
    assert ("step 5 was the last of epoch 0" in capsys.readouterr().out) == reported


def test_an_iteration_ends_with_the_open_epoch() -> None:
    """Also when all of its steps are complete, and when steps of the epoch before remain."""
    for step, lengths in ((5, (0, 4)), (3, (2, 6)), (0, (5, 9))):
        run = Run(step=step)
        batches = run.position.sampler(SAMPLES, GLOBAL_BATCH, TOTAL)
        singles = run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None)
        for epoch, length in enumerate(lengths):
            run.position.open_epoch = epoch
            assert len(list(batches)) == len(batches) == length
            assert len(list(singles)) == len(singles) == length * GLOBAL_BATCH


def test_set_epoch_with_another_epoch_is_refused() -> None:
    run = Run(step=5)
    sampler = run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None)
    sampler.set_epoch(1)
    with pytest.raises(SpecError, match=r"set_epoch\(0\): after step 5 training is in epoch 1"):
        sampler.set_epoch(0)


def test_a_program_may_count_its_epochs_from_1() -> None:
    run = Run(step=5)
    sampler = run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None)
    sampler.set_epoch(2)
    with pytest.raises(SpecError, match=r"set_epoch\(1\): after step 5 training is in epoch 2"):
        sampler.set_epoch(1)
    with pytest.raises(SpecError, match=r"set_epoch\(3\): after step 5 training is in epoch 1"):
        run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None).set_epoch(3)


def test_a_sampler_at_the_end_of_an_epoch_is_true() -> None:
    """A program may write `sampler or DistributedSampler(dataset)`."""
    run = Run(step=5)
    run.position.open_epoch = 0
    sampler = run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None)
    assert len(sampler) == 0
    assert sampler


def test_skip_windows_shorten_the_epoch() -> None:
    run = Run(skips=(SkipWindow(2, 3),))
    sampler = run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None)
    # Step 1 is in epoch 0; steps 2 to 4 of the order are skipped, so step 2 is the fifth.
    assert len(sampler) == 2 * GLOBAL_BATCH


@pytest.mark.parametrize("batch_size", [0, 5, 24])
def test_a_loader_batch_size_that_does_not_divide_the_step_is_refused(batch_size: int) -> None:
    with pytest.raises(SpecError, match="this rank trains on 6 samples per step"):
        Run(0, 2).position.distributed_sampler(SAMPLES, GLOBAL_BATCH, batch_size)


def test_the_epoch_is_known_before_the_data_order(capsys: pytest.CaptureFixture[str]) -> None:
    former = {"samples": SAMPLES, "global_batch": GLOBAL_BATCH, "seed": 3, "position": 60}
    run = Run(step=5, former=former)
    assert run.position.epoch == 1
    assert run.position.describe() == former
    run.position.order(SAMPLES, GLOBAL_BATCH)
    assert run.position.epoch == 1
    assert capsys.readouterr().out == ""
    run.position.order(SAMPLES, 2 * GLOBAL_BATCH)
    assert "the data order changed after step 5: global_batch 12 → 24" in capsys.readouterr().out


def ids_of(run: Run, global_batch: int, steps: int) -> list[int]:
    """The sample ids of the next steps."""
    seen: list[int] = []
    for _ in range(steps):
        seen += run.position.batch(SAMPLES, global_batch).tolist()
        run.position.completed += 1
    return seen


def resumed(run: Run) -> Run:
    former = json.loads(json.dumps(run.position.describe()))
    return Run(step=run.step, former=former)


@pytest.mark.parametrize(("before", "after"), [(10, 5), (5, 10)])
def test_another_global_batch_goes_on_from_the_same_position(
    before: int, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 samples of an epoch are read with one size, and 30 with the other, in two launches."""
    whole = Run().position.order(SAMPLES, before).step_ids(1).tolist()
    first, position = Run(), 20
    seen = ids_of(first, before, position // before)
    second = resumed(first)
    seen += ids_of(second, after, 1)
    # The third launch keeps the size of the second.
    third = resumed(second)
    assert third.position.order(SAMPLES, after).since == (position // before + 1, position)
    seen += ids_of(third, after, (SAMPLES - position) // after - 1)
    assert sorted(seen) == list(range(SAMPLES))
    assert seen[:before] == whole
    said = capsys.readouterr().out
    told = f"global_batch {before} → {after}; it continues from the same position"
    assert said.count(told) == 1
    assert third.position.order(SAMPLES, after).epoch(third.step + 1) == 1


def test_a_size_that_grows_during_a_launch_continues_alike_after_a_resume() -> None:
    whole = Run()
    expected = ids_of(whole, 5, 3) + ids_of(whole, 10, 3)
    cut = Run()
    seen = ids_of(cut, 5, 3) + ids_of(cut, 10, 1)
    assert seen + ids_of(resumed(cut), 10, 2) == expected
    assert len(set(expected)) == 45


def test_sizes_used_in_turn_keep_their_own_orders_after_a_resume() -> None:
    def both(run: Run, steps: int) -> list[int]:
        seen = []
        for _ in range(steps):
            seen += run.position.batch(SAMPLES, 10).tolist()
            seen += run.position.batch(SAMPLES, 5).tolist()
            run.position.completed += 1
        return seen

    whole, cut = Run(), Run()
    expected = both(whole, 4)
    assert both(cut, 2) + both(resumed(cut), 2) == expected


def test_data_that_is_skipped_at_a_change_of_the_batch_is_skipped_once() -> None:
    window = SkipWindow(3, 2)
    first = Run(skips=(window,))
    ids_of(first, 10, 2)
    second = Run(step=2, former=first.position.describe(), skips=(window,))
    # The first step of the new size is the first one that the window moves.
    assert second.position.order(SAMPLES, 5).position(3) == 20 + 2 * 5
    assert second.position.order(SAMPLES, 5).position(4) == 35


def test_a_skip_window_added_later_does_not_change_prefetched_steps() -> None:
    run = Run()
    loader = iter(run.position.sampler(SAMPLES, 4, 20))
    drawn = [next(loader) for _ in range(5)]
    run.position.completed = 2
    assert run.position.reached == 5
    run.position.skip([SkipWindow(6, 3)])
    drawn += [next(loader) for _ in range(5)]
    order = run.position.order(SAMPLES, 4)
    assert order.skips == (SkipWindow(6, 3),)
    assert drawn == [order.step_ids(step).tolist() for step in range(1, 11)]
    assert run.position.describe()["skips"] == [[6, 3]]


def test_an_epoch_ends_when_a_new_skip_window_covers_its_rest() -> None:
    """As after a resume, which knows the window from the start."""
    run = Run()
    run.position.open_epoch = 0
    for sampler in (
        run.position.sampler(SAMPLES, GLOBAL_BATCH, TOTAL),
        run.position.distributed_sampler(SAMPLES, GLOBAL_BATCH, None),
    ):
        drawn = iter(sampler)
        next(drawn)
        run.position.skip([SkipWindow(2, 6)])
        left = len(list(drawn))
        assert left == (0 if len(sampler) == 1 else GLOBAL_BATCH - 1)
        assert run.position._order is not None
        assert run.position._order.epoch(2) == 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("global_batch", [4, 12])
def test_ids_that_are_drawn_for_several_steps_are_those_of_each_step(
    world_size: int, global_batch: int
) -> None:
    """Across the ends of epochs, which lie within steps, and across a skip window."""
    order = DataOrder(
        samples=5, global_batch=global_batch, seed=2, skips=(SkipWindow(first_step=7, steps=3),)
    )
    for rank in range(world_size):
        drawn = order.rank_ids_of(range(3, 20), rank, world_size).tolist()
        assert drawn == [order.rank_ids(s, rank, world_size).tolist() for s in range(3, 20)]


def test_a_sampler_does_not_draw_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    permute = data_order.permute

    def counted(places: Any, *rest: Any) -> Any:
        drawn.append(len(places))
        return permute(places, *rest)

    monkeypatch.setattr(data_order, "permute", counted)
    sampler = Run().position.sampler(10_000, 2, 100)
    assert len(list(sampler)) == 100
    assert len(drawn) == 1


def test_ranks_with_different_seeds_are_refused() -> None:
    """Each would draw from another order, so samples would repeat and others be left out."""
    position = Position(
        rank=1, world_size=2, seed=8, seeds=(7, 8), skips=(), former={}, completed=0
    )
    with pytest.raises(SpecError, match="rank 0 has 7 and rank 1 has 8"):
        position.sampler(16, 8, 4)
