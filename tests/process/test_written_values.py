"""The program's own interval counts where the spec has none, and loses visibly where it has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.local_command import Local

PROGRAM = Path(__file__).with_name("interval_program.py")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


@pytest.mark.more
def test_the_program_s_interval_counts_unless_the_spec_has_one(local: Local) -> None:
    shutil.copy(PROGRAM, local.folder / "train.py")
    spec = local.folder / "run.toml"
    spec.write_text('name = "own"\ncommand = ["train.py"]\n')
    assert local.json("submit", str(spec), "--wait")["state"] == "completed"
    own = local.json("checkpoints", "own")
    assert [one["step"] for one in own] == [5, 10, 12]
    assert "checkpoint.interval = 5 (program)" in local.call("logs", "own").stdout
    shown = local.json("show", "own", "--spec")["settings"]
    assert shown["checkpoint.interval"] == {"value": 5, "source": "program"}
    changes = ("--set", "checkpoint.interval=9")
    first = ("fork", own[0]["id"], "--name", "set", "--wait")
    assert local.json(*first, *changes)["state"] == "completed"
    assert [one["step"] for one in local.json("checkpoints", "set")] == [9, 12]
    shown = local.json("show", "set", "--spec")["settings"]
    assert shown["checkpoint.interval"] == {"value": 9, "source": "--set"}
    said = local.call("logs", "set").stdout
    assert "checkpoint.interval = 9 (--set), checkpoint.snapshots = off (program)" in said
    assert "checkpoint.interval = 9 (--set) counts, and not 5 (program)" in said
