"""Data order: one permutation per epoch, the same at every rank count and in every version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.contracts.errors import SpecError
from holdfast.trainer import ElasticSampler
from holdfast.trainer.data.order import (
    Batch,
    DataOrder,
    SkipWindow,
    ids_at,
    local_batch,
    micro_parts,
    parse_skips,
    permute,
)

SEEDS = st.integers(-(2**63), 2**64)


@given(samples=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_visits_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    places = np.arange(samples, dtype=np.uint64)
    assert np.array_equal(np.sort(permute(places, samples, seed, epoch)), places)


@pytest.mark.more
@given(
    samples=st.integers(1, 500),
    seed=SEEDS,
    step=st.integers(1, 10**9),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_all_ranks_together_see_the_same_samples_at_every_rank_count(
    samples: int, seed: int, step: int, ranks: int
) -> None:
    order = DataOrder(samples=samples, global_batch=12, seed=seed)
    together = np.concatenate([order.rank_ids(step, rank, ranks) for rank in range(ranks)])
    assert np.array_equal(together, order.step_ids(step))
    assert together.dtype == np.int64
    assert together.min() >= 0
    assert together.max() < samples


@pytest.mark.more
@given(st.integers(1, 200), st.integers(0, 1000), st.integers(1, 300))
def test_a_range_of_ids_equals_the_ids_read_singly(samples: int, start: int, count: int) -> None:
    whole = ids_at(start, count, samples, 5)
    singly = [int(ids_at(start + i, 1, samples, 5)[0]) for i in range(count)]
    assert whole.tolist() == singly


def test_the_data_order_does_not_change_between_versions() -> None:
    assert ids_at(0, 20, 10, 0).tolist() == [
        *(5, 2, 8, 6, 0, 4, 9, 7, 1, 3),
        *(7, 3, 5, 1, 0, 4, 6, 8, 2, 9),
    ]


def test_each_seed_and_epoch_has_a_different_order() -> None:
    orders = {tuple(ids_at(0, 1000, 1000, seed)) for seed in range(20)}
    orders |= {tuple(ids_at(epoch * 1000, 1000, 1000, 0)) for epoch in range(1, 20)}
    assert len(orders) == 39


def test_an_order_looks_random() -> None:
    ids = ids_at(0, 20_000, 20_000, 1)
    correlation = np.corrcoef(np.arange(20_000), ids)[0, 1]
    fixed = int((ids == np.arange(20_000)).sum())
    assert abs(correlation) < 0.03
    # A random permutation of any length has one fixed point on average.
    assert fixed < 10


def test_a_skip_window_skips_data_from_its_step_on() -> None:
    plain = DataOrder(samples=1000, global_batch=4)
    skipping = DataOrder(samples=1000, global_batch=4, skips=(SkipWindow(10, 5),))
    assert np.array_equal(skipping.step_ids(9), plain.step_ids(9))
    assert np.array_equal(skipping.step_ids(10), plain.step_ids(15))
    assert skipping.epoch(250) == 1


def test_skip_windows_are_read_from_pairs() -> None:
    assert parse_skips([[30, 2], [10, 5], [30, 2]]) == (SkipWindow(10, 5), SkipWindow(30, 2))


def test_an_uneven_split_names_sizes_that_work() -> None:
    with pytest.raises(SpecError, match=r"16 does not split .* 3 ranks; run on 1, 2 or 4 ranks"):
        local_batch(16, 3)
    with pytest.raises(SpecError, match="a global batch of 15 or 18"):
        local_batch(16, 3)
    with pytest.raises(SpecError, match="2 does not split evenly over 4 ranks"):
        local_batch(2, 4)


@given(st.integers(1, 200), st.integers(1, 200))
def test_micro_batches_are_equal_and_small_enough(samples: int, samples_max: int) -> None:
    batch = np.arange(samples).view(Batch)
    parts = batch.micro(samples_max)
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) <= samples_max
    assert np.array_equal(np.concatenate(parts), np.arange(samples))


def test_a_micro_batch_size_of_0_is_refused() -> None:
    with pytest.raises(SpecError, match="expected 1 or more"):
        micro_parts(4, 0)


@pytest.mark.parametrize(("samples", "batch"), [(0, 4), (10, 0)])
def test_an_order_without_samples_is_refused(samples: int, batch: int) -> None:
    with pytest.raises(SpecError, match="expected 1"):
        DataOrder(samples=samples, global_batch=batch)


def test_a_sampler_gives_the_sessions_batches() -> None:
    order = DataOrder(samples=50, global_batch=6, seed=3)
    sampler = ElasticSampler(order, rank=1, world_size=2, first_step=4, last_step=8)
    assert len(sampler) == 5
    assert list(sampler) == [order.rank_ids(step, 1, 2).tolist() for step in range(4, 9)]
