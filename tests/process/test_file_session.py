"""Sessions whose checkpoint files a framework writes and reads: here a small one of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import CheckpointError, PreflightError, SpecError
from holdfast.trainer import Session
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.session.file_session import FileSession
from holdfast.trainer.staging.file_writers import Writer, bytes_writer, torch_writer
from holdfast.trainer.state.file_state import SavedFiles

LINE_BYTES = 700_000


class Notebook:
    """A framework that keeps a line of each step, so its file grows, and one tensor."""

    name = "notebook"

    def __init__(self, fixed: str = "") -> None:
        self.lines: list[str] = []
        self.weight = torch.zeros(4)
        self._fixed = fixed

    def step(self) -> None:
        self.lines.append(f"{len(self.lines)}:".ljust(LINE_BYTES, "."))
        self.weight += torch.rand(4)

    def check(self, step: int) -> None:
        if len(self.lines) != step:
            raise SpecError(f"{len(self.lines)} lines after {step} steps")

    def facts(self) -> dict[str, Any]:
        return {"lines": len(self.lines)}

    def why_fixed(self) -> str:
        return self._fixed

    def collect(self) -> dict[str, Writer]:
        content = json.dumps(self.lines).encode()
        return {"book/lines.json": bytes_writer(content), "weight.pt": torch_writer(self.weight)}

    def read(self, saved: SavedFiles, ranks: ControlGroup) -> Sequence[str]:
        self.lines = json.loads((saved.directory / "book/lines.json").read_bytes())
        self.weight = torch.load(saved.directory / "weight.pt", weights_only=True)
        return [f"{saved.facts['lines']} lines"]

    def weights(self) -> Iterable[torch.Tensor]:
        return [self.weight]


def train(directory: Path, total: int, interval: int = 2) -> Notebook:
    torch.manual_seed(0)
    book = Notebook()
    session = FileSession(book, directory=directory, interval=interval)
    for _ in session.steps(total):
        book.step()
    session.close()
    return book


def test_files_that_outgrow_their_slots_are_committed_and_resumed(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 9)
    train(tmp_path / "run", 5)
    resumed = train(tmp_path / "run", 9)
    assert resumed.lines == whole.lines
    assert torch.equal(resumed.weight, whole.weight)
    newest = RunPaths(tmp_path / "run").list_checkpoints()[-1]
    manifest = read_manifest(newest)
    assert manifest is not None
    assert {entry.path for entry in manifest.files} == {
        *("book/lines.json", "weight.pt", "rng/rank-00000.pt", "train_state.json")
    }
    assert len(json.loads((newest / "book/lines.json").read_bytes())) == 9


def test_a_damaged_file_is_passed_over_before_the_framework_reads_it(tmp_path: Path) -> None:
    train(tmp_path / "run", 4)
    newest = RunPaths(tmp_path / "run").list_checkpoints()[-1]
    path = newest / "book/lines.json"
    path.write_bytes(path.read_bytes().replace(b"3:", b"9:"))
    book = Notebook()
    session = FileSession(book, directory=tmp_path / "run")
    assert session.step == 2
    assert len(book.lines) == 2
    session.close()


def test_a_framework_that_made_other_steps_than_the_session_is_refused(tmp_path: Path) -> None:
    session = FileSession(Notebook(), directory=tmp_path / "run")
    with pytest.raises(SpecError, match="0 lines after 1 steps"):
        list(session.steps(3))
    session.__exit__(SpecError, SpecError("ended"), None)


def test_each_kind_of_session_refuses_the_files_of_the_other(tmp_path: Path) -> None:
    train(tmp_path / "files", 2)
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"notebook wrote this checkpoint.* uses Session"):
        Session(model, directory=tmp_path / "files")
    with Session(model, directory=tmp_path / "tensors") as session:
        list(session.steps(1))
    with pytest.raises(CheckpointError, match=r"Session wrote this checkpoint.* uses notebook"):
        FileSession(Notebook(), directory=tmp_path / "tensors")


@pytest.mark.more
def test_files_on_the_nodes_own_disks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_MIRROR", f"file://{tmp_path}/mirror")
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_LOCAL", str(tmp_path))
    with pytest.raises(PreflightError, match=r"Remove checkpoint\.local"):
        FileSession(Notebook(), directory=tmp_path / "run")
