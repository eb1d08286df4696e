"""Exit statuses are those of their table, and disk answers if the index cannot."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.support.storage import small_storage
from tests.unit.test_cli import ended_run, write_spec

from holdfast.contracts.disk.paths import RunPaths

__all__ = ["ended_run"]
WAIT_S = 60.0


def test_an_order_at_the_wrong_time_is_refused(call: Call, ended_run: RunPaths) -> None:
    assert call("resume", "kelp").status == 5
    drilled = call("drill", "kelp")
    assert (drilled.status, "not running" in drilled.err) == (5, True)
    assert call("cancel", "kelp").status == 0
    for order in ("stop", "pause", "cancel"):
        refused = call(order, "kelp")
        assert (refused.status, "there is nothing to" in refused.err) == (5, True), refused
    (newest,) = ended_run.list_checkpoints()[-1:]
    assert call("unpin", f"kelp:{newest.name}").status == 5
    # A value that is wrong at any time remains misuse.
    assert call("relaunch", "kelp", "--gpus", "0").status == 2


def test_a_missing_path_has_one_status(call: Call, ended_run: RunPaths, tmp_path: Path) -> None:
    none = tmp_path / "none"
    spec = write_spec(tmp_path)
    for arguments in (
        ["submit", f"{none}.toml"],
        ["fork", f"kelp:{ended_run.list_checkpoints()[0].name}", "--spec", f"{none}.toml"],
        ["simulate", f"{none}.toml", "--trace", none],
        ["simulate", spec, "--trace", none, "--steps", "9", "--cost", "step_s=1"],
        ["import", none, "--name", "other"],
        ["drill", "--directory", none],
        ["reindex", none],
        ["verify", none / "checkpoints" / "step-00000010.a0001.l01"],
        ["export", none, "--to", "torch", "-o", tmp_path / "x.pt"],
    ):
        missing = call(*arguments)
        assert missing.status == 3, (arguments, missing)
        assert str(none) in missing.err


def test_an_existing_output_has_one_status(call: Call, ended_run: RunPaths, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "train.py").write_text("")
    spec = write_spec(tmp_path)
    checkpoint = f"kelp:{ended_run.list_checkpoints()[0].name}"
    for arguments in (
        ["export", checkpoint, "--to", "torch", "-o", there],
        ["init", there, "--executor", "local"],
        ["import", there, "--name", "kelp"],
        ["fork", checkpoint, "--spec", spec],
    ):
        refused = call(*arguments)
        assert refused.status == 5, (arguments, refused)
        assert "exist" in refused.err


@pytest.mark.more
@pytest.mark.parametrize("answer", ["Ctrl-C", "Ctrl-D", "no"])
def test_a_question_that_is_not_answered_yes_deletes_nothing(
    home: Path, ended_run: RunPaths, answer: str
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "holdfast.cli.main", "prune", "kelp"]
    environment = {**os.environ, "COLUMNS": "80"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        printed, ends_at = b"", time.monotonic() + WAIT_S
        while b"?" not in printed and time.monotonic() < ends_at:
            time.sleep(0.05)
            with contextlib.suppress(BlockingIOError):
                printed += os.read(ours, 4096)
        if answer == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            os.write(ours, b"\x04" if answer == "Ctrl-D" else b"n\n")
        assert process.wait(WAIT_S) == 5
    finally:
        process.kill()
    os.close(ours)
    assert len(ended_run.list_checkpoints()) == 2
    # The question is preceded by a table of 80 columns, in which ids are whole.
    for directory in ended_run.list_checkpoints():
        assert directory.name in printed.decode()


def test_a_root_with_a_typo_is_an_error(call: Call, ended_run: RunPaths, root: Path) -> None:
    typo = root.with_name("rums")
    for arguments in (["runs"], ["show", "kelp"], ["wait", "kelp"], ["supervise", "--all"]):
        missing = call(*arguments, "--root", typo)
        assert missing.status == 3, (arguments, missing)
        assert f"--root {typo}: no such directory" in missing.err
        assert f"did you mean {root}?" in missing.err
    assert [one["run"] for one in call("runs", "--root", root, "--json").json] == ["kelp"]


def test_a_new_root_is_an_empty_list(call: Call, home: Path) -> None:
    assert call("runs", "--json").json == []
    said = call("runs")
    assert said.status == 0
    assert "holdfast submit SPEC" in said.out


@pytest.mark.more
@pytest.mark.parametrize("problem", ["read-only", "full"])
def test_runs_are_shown_without_a_usable_index(
    call: Call,
    ended_run: RunPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    problem: str,
) -> None:
    newest = ended_run.list_checkpoints()[-1]
    with small_storage(tmp_path, "512k") as storage:
        monkeypatch.setenv("HOLDFAST_ROOT", str(ended_run.directory.parent))
        monkeypatch.setenv("HOLDFAST_HOME", str(storage))
        if problem == "full":
            subprocess.run(["fallocate", "-l", "500k", storage / "other"], check=False)
        else:
            subprocess.run(["mount", "-o", "remount,ro", storage], check=True)
        for command in ("runs", "show", "checkpoints", "lineage"):
            answer = call(command, *([] if command == "runs" else ["kelp"]), "--json")
            assert answer.status == 0, answer
            assert "from the runs' folders" in answer.err
            assert newest.name in answer.out or command in {"runs", "show"}
        # A database that somebody chose is not replaced.
        monkeypatch.setenv("HOLDFAST_DATABASE_URL", f"sqlite:///{storage}/holdfast.db")
        assert call("runs").status == 4


@pytest.mark.more
def test_the_removal_of_the_index_asks(call: Call, ended_run: RunPaths) -> None:
    call("runs")
    refused = call("db", "downgrade", "base")
    assert (refused.status, "add --yes" in refused.err) == (2, True)
    assert call("db", "current").status == 0
    assert call("db", "downgrade", "base", "--yes").status == 0
    assert call("db", "current").status == 1
