"""A resume from storage with failing reads: temporary failures are retried, others fall back."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.reading import READ_WAITS_S
from holdfast.contracts.records.history import load_events
from holdfast.trainer import Session

FILES = ("manifest.json", "train_state.json", ".metadata", "__0_0.distcp")
TRIES = 1 + len(READ_WAITS_S)


class Storage:
    """Counts the accesses to the newest checkpoint's files, and makes some of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, newest: Path) -> None:
        self.opened: Counter[str] = Counter()
        self.refused: dict[str, range] = {}
        self._newest, self._fstat = newest, os.fstat
        monkeypatch.setattr(os, "fstat", self._look)

    def _look(self, handle: int) -> os.stat_result:
        # Holdfast calls `fstat` for every file of a checkpoint after it is opened.
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.parent == self._newest:
            self.opened[path.name] += 1
            if self.opened[path.name] in self.refused.get(path.name, ()):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return self._fstat(handle)


def launch(directory: Path, steps: int) -> tuple[int, float]:
    """Train up to `steps` with a save at each; returns (resumed step, weight at that step)."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, directory=directory, interval=1, snapshots="off") as session:
        began, weight = session.step, model.weight.item()
        for _ in session.steps(steps):
            model(torch.ones(1)).sum().backward()
            optimizer.step()
    return began, weight


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A run with checkpoints of steps 1 and 2, in storage without failures yet."""
    launch(tmp_path / "run", 2)
    newest = RunPaths(tmp_path / "run").list_checkpoints()[-1]
    assert newest.name.startswith("step-00000002")
    return Storage(monkeypatch, newest)


def resumed(directory: Path) -> list[str]:
    """The checkpoints that the last resume skipped."""
    lines = [e for e in load_events(RunPaths(directory)) if e.kind is EventKind.RESUMED]
    return list(lines[-1].data["skipped"])


@pytest.mark.more
@pytest.mark.parametrize("name", FILES)
def test_temporary_read_failure_is_retried(storage: Storage, tmp_path: Path, name: str) -> None:
    storage.refused[name] = range(1, TRIES)
    assert launch(tmp_path / "run", 3)[0] == 2
    assert resumed(tmp_path / "run") == []
    assert storage.opened[name] >= TRIES


@pytest.mark.more
@pytest.mark.parametrize("name", FILES)
def test_permanent_read_failure_falls_back_to_the_previous_checkpoint(
    storage: Storage, tmp_path: Path, name: str
) -> None:
    storage.refused[name] = range(1, 100)
    assert launch(tmp_path / "run", 3)[0] == 1
    (line,) = resumed(tmp_path / "run")
    assert line.startswith("step-00000002")
    assert "Input/output error" in line


def test_manifest_of_the_chosen_checkpoint_is_read_once(storage: Storage, tmp_path: Path) -> None:
    # One read calls `fstat` twice: for the file's type and for its size.
    storage.refused["manifest.json"] = range(3, 100)
    assert launch(tmp_path / "run", 3)[0] == 2
    assert storage.opened["manifest.json"] == 2
