"""Losses, generators and default devices on GPUs: the cases of tests/unit/test_devices.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.contracts.errors import NumericsError
from holdfast.trainer import Session
from holdfast.trainer.state import rng

STEPS = 8
DRAWN = 1000


@pytest.fixture(params=["cpu", "cuda"])
def default(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_device(request.param)
    yield
    torch.set_default_device(None)


def train(folder: Path, device: torch.device, steps: int, *, nan_at: int = 0) -> list[float]:
    """Train with dropout on `device`, whichever is current, and return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with Session(model, optimizer, directory=folder, interval=2) as session:
        for step in session.steps(steps):
            loss = model(torch.ones(16, 64, device=device)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
            session.observe(loss.detach() * (torch.nan if step == nan_at else 1.0))
    return [float(loss) for loss in losses]


@pytest.mark.usefixtures("default")
def test_dropout_continues_exactly_on_the_second_gpu(
    two_gpus: tuple[torch.device, torch.device], tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", two_gpus[1], STEPS)
    first = train(tmp_path / "cut", two_gpus[1], STEPS // 2)
    assert first + train(tmp_path / "cut", two_gpus[1], STEPS) == whole


def test_a_bad_loss_on_the_second_gpu_is_found_and_no_other(
    two_gpus: tuple[torch.device, torch.device], tmp_path: Path
) -> None:
    with pytest.raises(NumericsError, match="step 5"):
        train(tmp_path, two_gpus[1], STEPS, nan_at=5)


def test_generators_of_all_gpus_are_restored(device: torch.device) -> None:
    def draw() -> list[list[float]]:
        places = [torch.device("cpu")]
        if device.type == "cuda":
            places += [torch.device("cuda", n) for n in range(torch.accelerator.device_count())]
        return [torch.rand(DRAWN, device=place).tolist() for place in places]

    draw()
    states = rng.capture()
    expected = draw()
    assert draw() != expected
    rng.restore(states)
    assert draw() == expected
