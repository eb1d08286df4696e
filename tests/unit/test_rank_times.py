"""Where the time of a rank goes: the wait for its next batch, for other ranks, and its own work."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.contracts.node.rank_status import RankRecord, RankStatusTable
from holdfast.trainer.ranks.rank_context import DataWaits
from holdfast.workers.agent.watch.rank_watch import RankWatch

ITEM_S = 0.02


class SlowItems(Dataset[torch.Tensor]):
    """Items that take `ITEM_S` each."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(ITEM_S)
        return torch.tensor(index)


@pytest.fixture
def table() -> Iterator[RankStatusTable]:
    made, handle = RankStatusTable.create(2)
    yield made
    made.close()
    os.close(handle)


def waited_s(record: RankRecord) -> float:
    return record.data_wait_s(time.monotonic())[0]


def test_one_word_has_the_finished_waits_and_the_current_one(table: RankStatusTable) -> None:
    record = table.record(1)
    assert record.data_wait_s(1e6) == (0.0, False)
    for _ in range(2):
        record.begin_data_wait()
        time.sleep(0.05)
        assert record.data_wait_s(time.monotonic())[1]
        record.end_data_wait()
    seconds, is_waiting = record.data_wait_s(time.monotonic())
    assert not is_waiting
    assert 0.1 <= seconds < 5
    table.reset()
    assert record.data_wait_s(1e6) == (0.0, False)


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_wait_for_each_batch_counts(
    table: RankStatusTable, loader: type[DataLoader[torch.Tensor]], workers: int
) -> None:
    record, original = table.record(0), _BaseDataLoaderIter.__dict__["__next__"]
    waits = DataWaits(record)
    try:
        batches = loader(SlowItems(), batch_size=2, num_workers=workers)
        assert [batch.tolist() for batch in batches] == [[n, n + 1] for n in range(0, 10, 2)]
        assert waited_s(record) >= (9 if workers == 0 else 1) * ITEM_S
        before = waited_s(record)
        # What the program does between two batches is no wait, nor is a loader of a thread.
        thread = threading.Thread(target=lambda: list(loader(SlowItems(), batch_size=5)))
        thread.start()
        thread.join()
        assert waited_s(record) == before
    finally:
        waits.close()
    assert _BaseDataLoaderIter.__dict__["__next__"] is original
    list(loader(SlowItems(), batch_size=5))
    assert waited_s(record) == before


def test_an_error_of_the_loader_ends_the_wait(table: RankStatusTable) -> None:
    class Broken(SlowItems):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise ValueError(f"no sample {index}")

    record = table.record(0)
    waits = DataWaits(record)
    try:
        with pytest.raises(ValueError, match="no sample 0"):
            list(DataLoader(Broken()))
    finally:
        waits.close()
    assert not record.data_wait_s(time.monotonic())[1]


def test_a_bucket_has_the_times_per_step_and_a_step_that_has_not_ended(
    table: RankStatusTable,
) -> None:
    watch = RankWatch(table, 0, {})
    try:
        record = table.record(0)
        record.register(0, 0)
        record.finish_step(1)
        time.sleep(0.3)
        watch.take_bucket()
        for step in range(2, 7):
            record.begin_data_wait()
            time.sleep(0.15)
            record.end_data_wait()
            time.sleep(0.05)
            record.finish_step(step)
        time.sleep(0.15)
        first, absent = watch.take_bucket()
        assert math.isnan(absent.step_s)
        assert first.step_s == pytest.approx(0.25, abs=0.15)
        assert first.data_s > 0.4 * first.step_s
        # It slept: it did not wait for another process.
        assert first.others_s < 0.2 * first.step_s
        time.sleep(0.5)
        stuck = watch.take_bucket()[0]
        assert stuck.step_s >= 0.6
    finally:
        watch.close()
