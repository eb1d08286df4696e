"""Loops that a program writes itself: work after a boundary, an early last commit, a late start."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.contracts.paths import RunPaths
from holdfast.trainer import load_checkpoint
from holdfast.trainer.frameworks.session import FrameworkSession


class Training:
    """A model with its session in a folder."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.run = RunPaths(directory)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        settings = {"interval": 100, "snapshots": "off", **more}
        self.session = FrameworkSession(self.model, self.optimizer, directory=directory, **settings)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()

    def manifests(self) -> list[Manifest]:
        found = [read_manifest(path) for path in self.run.list_checkpoints()]
        return [manifest for manifest in found if manifest is not None]


def test_a_due_save_waits_for_the_work_after_its_boundary(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", interval=2)
    session = training.session
    assert not session.begin(4)
    for step in range(1, 5):
        training.step()
        session.log(loss=float(step))
        assert not session.boundary(has_end=step == 2)
        if step == 2:
            session.log(accuracy=0.5)
            session.finish_end()
    session.close()
    first, last = training.manifests()
    assert (first.step, first.metrics) == (2, {"loss": 2.0, "accuracy": 0.5})
    assert last.step == 4
    lines = (training.run.metrics_of(0, 1)).read_text().splitlines()
    assert any('"step": 2' in line and "accuracy" in line for line in lines)


def test_what_follows_finish_is_not_saved(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    session = training.session
    session.begin(1)
    training.step()
    session.boundary()
    trained = training.model.weight.detach().clone()
    session.finish()
    assert session.committed_step == 1
    with torch.no_grad():
        training.model.weight.fill_(7.0)
    session.close()
    (saved,) = training.run.list_checkpoints()
    again = nn.Linear(1, 1)
    load_checkpoint(saved, again)
    assert torch.equal(again.weight, trained)


def test_a_start_after_another_run_counts_only_without_a_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", begins_at=5)
    assert (training.session.step, training.session.committed_step) == (5, 0)
    training.session.begin(6)
    training.step()
    training.session.boundary()
    training.session.close()
    assert [manifest.step for manifest in training.manifests()] == [6]
    again = Training(tmp_path / "run", begins_at=5)
    assert (again.session.step, again.session.committed_step) == (6, 6)
    again.session.close()


def test_a_logged_mean_does_not_count_beside_the_losses_of_its_step(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    session = training.session
    session.begin(1)
    training.step()
    session.observe(1.0)
    session.log(loss=math.nan)
    # The default policy for NaN is to stop. The step's own loss was finite.
    assert not session.boundary()
    session.close()
    assert [manifest.step for manifest in training.manifests()] == [1]
