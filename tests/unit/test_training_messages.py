"""Messages of the page on troubleshooting that a training program raises, and their advice.

The sessions, checkpoints, flushers and sockets are real.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tests.support.cli_calls import Call
from tests.unit.test_engine_resume import write_record
from torch import nn

from holdfast.contracts import environment
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import (
    DamagedCheckpointError,
    MirrorError,
    PreflightError,
    RunConflictError,
    SpecError,
)
from holdfast.contracts.node.rank_status import RankStatusTable
from holdfast.trainer import Session
from holdfast.trainer.loading import restore
from holdfast.trainer.mirror.transfer import open_store
from holdfast.trainer.process import flusher_supervisor
from holdfast.trainer.process.flusher_supervisor import FlusherSupervisor


def launch(directory: Path, steps: int) -> tuple[int, list[float]]:
    """Train up to `steps`, with a save at each; return the first step and the weights there."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, directory=directory, interval=1, snapshots="off") as session:
        began, weights = session.step, model.weight.flatten().tolist()
        for _ in session.steps(steps):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            session._saver.wait()
    return began, weights


def flip(checkpoint: Path) -> None:
    """Change a byte in the middle of the data, which only a read of all of it finds."""
    path = checkpoint / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# --- Data -------------------------------------------------------------------------------------


def test_a_dataset_smaller_than_the_global_batch(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with Session(model, directory=tmp_path / "run", snapshots="off") as session:
        with pytest.raises(
            SpecError, match=r"each step would contain samples more than once. Choose .* 10 or less"
        ):
            session.batch(10, 16)
        assert len(session.batch(10, 10)) == 10


# --- The start --------------------------------------------------------------------------------


def test_variables_of_an_agent_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_table, handle = RankStatusTable.create(1)
    gone = f"/proc/{os.getpid()}/fd/{handle}"
    status_table.close()
    os.close(handle)
    told = {environment.RANK_STATUS: gone, environment.FLUSHER: str(tmp_path / "flusher")}
    told |= {environment.RUN_DIRECTORY: str(tmp_path / "run")}
    told |= {environment.ATTEMPT: "1", environment.LAUNCH: "1"}
    with monkeypatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        with pytest.raises(
            PreflightError, match=r"the agent that created it has ended. Start the attempt again"
        ):
            launch(tmp_path / "run", 1)
    assert launch(tmp_path / "run", 1)[0] == 0


def test_a_flusher_that_cannot_start_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "holdfast.py").write_text("raise OSError('the file server is away')\n")
    log = tmp_path / "flusher.log"
    given = {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}
    with pytest.raises(PreflightError, match=r"flusher did not start within .*see .*flusher\.log"):
        FlusherSupervisor(
            tmp_path / "address", node=0, nodes=1, log=log, run=tmp_path / "run", env=given
        )
    assert "the file server is away" in log.read_text()


def test_two_programs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher_supervisor, "FORMER_TIMEOUT_S", 0.3)
    model = nn.Linear(1, 1)
    place = RunPaths(tmp_path / "run").attempt(0).flusher_address(1, 0)
    with (
        Session(model, directory=tmp_path / "run", snapshots="off"),
        pytest.raises(
            RunConflictError,
            match=r"another launch of this program is still alive after .* another directory",
        ),
    ):
        flusher_supervisor.wait_for_former(place, tmp_path / "run")
    flusher_supervisor.wait_for_former(place, tmp_path / "run")


# --- Damaged checkpoints ----------------------------------------------------------------------


def test_a_run_without_a_whole_checkpoint_continues_from_a_copy(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    launch(run.directory, 2)
    shutil.copytree(run.checkpoints, tmp_path / "copy", symlinks=True)
    for checkpoint in run.list_checkpoints():
        flip(checkpoint)
    with pytest.raises(
        DamagedCheckpointError,
        match=r"no checkpoint is whole, and the newest was read in part.* Restore one from a copy",
    ):
        launch(run.directory, 3)
    newest = run.list_checkpoints()[-1]
    shutil.rmtree(newest)
    shutil.copytree(tmp_path / "copy" / newest.name, newest)
    began, weights = launch(run.directory, 3)
    assert (began, len(weights)) == (2, 2)


@pytest.mark.more
def test_the_log_names_what_was_resumed_from_and_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunPaths(tmp_path / "run")
    launch(run.directory, 2)
    first, last = run.list_checkpoints()
    flip(last)
    capsys.readouterr()
    assert launch(run.directory, 2)[0] == 1
    said = capsys.readouterr().out
    assert f"run continues after step 1 from run:{first.name}" in said
    assert f"skipped {last.name}: damaged: " in said
    # Another folder is another run.
    assert launch(tmp_path / "other", 1)[0] == 0
    assert "continues after" not in capsys.readouterr().out


@pytest.mark.more
def test_a_run_whose_read_checkpoints_are_all_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    run = RunPaths(tmp_path / "run")
    launch(run.directory, 4)
    *_, before, last = run.list_checkpoints()
    for checkpoint in (before, last):
        flip(checkpoint)
    monkeypatch.setattr(restore, "FALLBACKS_MAX", 2)
    with pytest.raises(
        DamagedCheckpointError, match=r"all checkpoints that were read are damaged \(2\).* verify"
    ) as caught:
        launch(run.directory, 5)
    assert [line.partition(":")[0] for line in caught.value.damaged] == [last.name, before.name]
    # `verify` records what it found in a run's journal. That is not read again.
    manifest = read_manifest(last)
    assert manifest is not None
    write_record(run, uid=manifest.run_uid)
    for checkpoint in (before, last):
        assert call("verify", checkpoint).status == 1
    assert launch(run.directory, 5)[0] == 2


# --- Mirrors ----------------------------------------------------------------------------------


def test_a_mirror_on_s3_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        with pytest.raises(
            MirrorError, match=r"s3fs is not installed \(.*\). Install Holdfast with the extra `s3`"
        ):
            open_store("s3://bucket/run")
    monkeypatch.setenv(environment.S3_ENDPOINT, "http://127.0.0.1:9")
    open_store("s3://bucket/run")
