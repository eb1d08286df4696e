"""Storage that fails, and a train state without its tensor, are called what they are."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli_calls import Call
from tests.runs import RunFolder

from holdfast.contracts import damage
from holdfast.contracts.damage import word_for
from holdfast.contracts.errors import CheckpointError, PreflightError
from holdfast.trainer.loading.resume import inspect
from holdfast.trainer.state import plain
from holdfast.workers.trainer_call import ask_trainer

EIO = f"__0_0.distcp: cannot be read: {os.strerror(errno.EIO)}"


def test_a_file_that_storage_cannot_read_is_unreadable_and_not_damaged(
    call: Call, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(root, "alga", "u" * 32)
    run.submit(1, 2, 1.7e9)
    name = run.commit(10, 1)

    def fail(*_: Any) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(damage, "range_digest", fail)
    said = call("verify", f"alga:{name}")
    assert said.status == 1
    assert f"alga:{name}: unreadable\n  {EIO}" in said.out
    assert "damaged" not in said.out
    assert inspect(run.paths.checkpoint(name))[1] == f"unreadable: {EIO}"


def test_one_file_that_differs_makes_a_checkpoint_damaged() -> None:
    assert word_for([EIO]) == "unreadable"
    assert word_for([EIO, "b: 3 bytes, expected 4"]) == "damaged"
    assert word_for([]) == "damaged"


@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.parametrize("value", ["optimizer.gone", None, ["x"], "\x1b[2J"])
def test_a_train_state_without_its_tensor_names_the_tensor(kind: str, value: Any) -> None:
    document = {"a": [{plain.MARK: kind, "value": value}]}
    with pytest.raises(CheckpointError, match="which the checkpoint does not have") as caught:
        plain.decode(document, {"optimizer.there": torch.ones(1)})
    assert str(caught.value).isprintable()


def python_that_fails(tmp_path: Path, line: str) -> list[str]:
    """A Python whose trainer ends with this last line on standard error."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit({line!r})\n")
    script.chmod(0o755)
    return [str(script)]


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("KeyError: 'x'", CheckpointError, "the checkpoint cannot be read: KeyError: 'x'"),
        ("holdfast: it is damaged", CheckpointError, "it is damaged"),
        ("No module named holdfast", PreflightError, r"install `holdfast\[trainer\]` there"),
        ("ModuleNotFoundError: No module named 'torch'", PreflightError, "install"),
    ],
)
def test_only_a_missing_module_is_a_problem_of_the_environment(
    tmp_path: Path, line: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        ask_trainer(python_that_fails(tmp_path, line), "export")
