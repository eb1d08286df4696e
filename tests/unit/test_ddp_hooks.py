"""Hooks of DDP whose state no checkpoint contains are reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from holdfast.trainer.state.not_restored import warn_of_local_buffers
from holdfast.trainer.state.train_state import TrainState


@pytest.fixture
def model(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.destroy_process_group()


def test_power_sgd_is_reported_once(
    model: DistributedDataParallel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    TrainState(model, [], [], None, rank=0, world_size=1)
    TrainState(model, [], [], None, rank=1, world_size=2)
    told = capsys.readouterr()
    assert (told.out + told.err).count("the PowerSGDState of DDP's communication hook") == 1


def test_hooks_without_a_state_are_not_reported(
    model: DistributedDataParallel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.register_comm_hook(None, allreduce_hook)
    TrainState(model, [], [], None, rank=0, world_size=1)
    told = capsys.readouterr()
    assert "communication hook" not in told.out + told.err


@pytest.mark.parametrize(
    ("norm", "use_buffers", "is_reported"),
    [
        (nn.BatchNorm1d(2), True, True),
        (nn.BatchNorm1d(2), False, False),
        (nn.SyncBatchNorm(2), True, False),
        (nn.LayerNorm(2), True, False),
    ],
)
def test_averages_of_statistics_that_differ_between_ranks_are_reported(
    norm: nn.Module, use_buffers: bool, is_reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    average = AveragedModel(nn.Sequential(norm), use_buffers=use_buffers)
    extra = {"ema": average, "other": 1}
    for rank, world_size in ((0, 1), (1, 2)):
        warn_of_local_buffers(extra, rank, world_size)
    assert capsys.readouterr().out == ""
    warn_of_local_buffers(extra, 0, 2)
    assert ("extra.ema averages the running statistics" in capsys.readouterr().out) == is_reported
