"""Storage that fails, and a train state without its tensor, are called what they are."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cli_calls import Call
from tests.support.runs import RunFolder
from tests.unit.test_cli import ended_run

from holdfast.contracts.disk import digests
from holdfast.contracts.disk.damage import word_for
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import CheckpointError, PreflightError, SpecError
from holdfast.trainer.loading.resume import inspect
from holdfast.trainer.state import plain
from holdfast.workers.checkpoints.trainer_call import ask_trainer

__all__ = ["ended_run"]
EIO = f"__0_0.distcp: cannot be read: {os.strerror(errno.EIO)}"


def test_a_file_that_storage_cannot_read_is_unreadable_and_not_damaged(
    call: Call, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(root, "alga", "u" * 32)
    run.submit(1, 2, 1.7e9)
    name = run.commit(10, 1)

    def fail(*_: Any) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(digests, "range_digest", fail)
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
        ("KeyError: 'x'", CheckpointError, "failed with exit status 1: KeyError: 'x'"),
        ("torch.AcceleratorError: gone", CheckpointError, "status 1: torch.AcceleratorError: gone"),
        ("MemoryError", CheckpointError, "failed with exit status 1: MemoryError"),
        (
            "usage: x\npython -m holdfast.trainer.export: error: argument --dtype: invalid choice",
            SpecError,
            "^argument --dtype: invalid choice$",
        ),
        ("holdfast: it is damaged", CheckpointError, "it is damaged"),
        ("No module named holdfast", PreflightError, "Holdfast with the extra `trainer` there"),
        ("ModuleNotFoundError: No module named 'torch'", PreflightError, "install"),
    ],
)
def test_only_a_missing_module_is_a_problem_of_the_environment(
    tmp_path: Path, line: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        ask_trainer(python_that_fails(tmp_path, line), "export")


def test_a_call_that_was_killed_or_chatty_is_understood(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    with pytest.raises(CheckpointError, match=r"was ended by signal 9 \(Killed\)"):
        ask_trainer([str(python)], "export")
    python.write_text("#!/bin/sh\necho Loading modules\necho '{\"tensors\": 3}'\n")
    assert ask_trainer([str(python)], "export") == {"tensors": 3}
    python.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(CheckpointError, match="printed no answer, but 'hello'"):
        ask_trainer([str(python)], "export")


def test_a_python_that_cannot_run_here_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    with pytest.raises(PreflightError, match=r"could not read the checkpoint \(.*No such file"):
        ask_trainer([str(python)], "export")
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    with pytest.raises(PreflightError, match=r"could not read the checkpoint \(.*timed out"):
        ask_trainer([str(python)], "export", timeout_s=0.2)


def test_each_command_states_the_true_cause(
    call: Call, ended_run: RunPaths, tmp_path: Path
) -> None:
    first, _ = ended_run.list_checkpoints()
    output = tmp_path / "x.pt"
    wrong = call("export", f"kelp:{first.name}", "--to", "torch", "-o", output, "--dtype", "fp16")
    assert wrong.status == 2
    assert "'float16'" in wrong.err
    assert call("prune", "kelp", "--yes").status == 0
    gone = call("doctor", "fit", "kelp", "--gpus", "2", "--checkpoint", f"kelp:{first.name}")
    assert gone.status == 3
    assert "deleted" in gone.err
    assert "committed" not in gone.err


@pytest.mark.more
def test_logs_that_are_followed_as_json_are_a_stream(
    home: Path, call: Call, ended_run: RunPaths
) -> None:
    log = ended_run.attempt(1).rank_log(0, 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\nthr")
    command = [sys.executable, "-m", "holdfast.cli.main", "logs", "kelp", "--follow", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        try:
            lines = [json.loads(following.stdout.readline()) for _ in range(2)]
            assert [one["text"] for one in lines] == ["one\n", "two\n"]
            assert lines[0] | {"path": ""} == {
                "attempt": 1,
                "launch": 1,
                "rank": 0,
                "stream": "stdout",
                "path": "",
                "text": "one\n",
            }
            assert following.poll() is None
            with log.open("a") as stream:
                stream.write("ee\n")
            assert json.loads(following.stdout.readline())["text"] == "three\n"
            # The run waits for a relaunch. Its end ends the stream.
            assert call("cancel", "kelp").status == 0
            assert following.wait(60) == 0
        finally:
            following.kill()
