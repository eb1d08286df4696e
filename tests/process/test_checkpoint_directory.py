"""Checkpoints on other storage than the root: a whole run, and every way to name a checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, send
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.leases import reading, storage_time
from holdfast.contracts.disk.manifest import committed_checkpoints, read_tombstone
from holdfast.contracts.disk.paths import RunPaths, hold, plain_checkpoint
from holdfast.contracts.errors import ForeignFileError, PreflightError
from holdfast.contracts.states import AttemptState
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.queries.run_queries import find_checkpoint
from holdfast.trainer.loading.checkpoint import find_directory
from holdfast.workers.checkpoints import deletion
from holdfast.workers.runs import preflight, run_folders

NOBODY = 65_534


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalRun:
    """A run on two ranks whose checkpoints are in `tmp_path / "large"`."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    checkpoint = {"interval": 5, "directory": str(tmp_path / "large"), "keep": {"last": 2}}
    settings: dict[str, Any] = {"steps": 40, "sleep_s": 0.2, "hurry": str(tmp_path / "hurry")}
    return LocalRun(tmp_path / "root", checkpoint=checkpoint, **settings)


def names(paths: RunPaths) -> list[str]:
    return [manifest.name for manifest in committed_checkpoints(paths)]


@pytest.mark.more
def test_run_is_preempted_and_resumes_with_its_checkpoints_elsewhere(
    run: LocalRun, tmp_path: Path
) -> None:
    paths = run.paths
    try:
        first = run.submit()
        run.wait_for_step(first, 12)
        send(run.claim(first).pid, signal.SIGTERM)
        stopped = run.wait_for_end()
        assert stopped.state is AttemptState.PREEMPTED
        (tmp_path / "hurry").touch()
        run.submit(gpus=1)
        ended = run.wait_for_end()
    finally:
        run.end_all()
    assert (ended.state, ended.last_step) == (AttemptState.COMPLETED, 40)
    assert ended.resumed_from is not None
    (real,) = (tmp_path / "large").iterdir()
    uid = run_folders.read_record(paths).uid
    assert real.name == f"tried.{uid}"
    assert {path.name for path in real.iterdir()} == {"checkpoints", "tombstones", "run"}
    assert paths.checkpoints.readlink() == real / "checkpoints"

    # A reader protects a checkpoint there, and a deletion leaves its tombstone there.
    oldest, *_, newest = names(paths)
    with reading(paths.checkpoint(oldest)) as is_leased:
        assert is_leased
        assert any(f"{oldest}.reading-" in path.name for path in (real / "checkpoints").iterdir())
        assert oldest not in {one.name for one in deletion.apply(paths, by="tests")}
    deleted = deletion.apply(paths, by="tests")
    assert oldest in {one.name for one in deleted}
    assert len(names(paths)) == 2
    assert {path.stem for path in (real / "tombstones").glob("*.json")} >= {oldest}
    tombstone = read_tombstone(paths.tombstone(oldest))
    assert tombstone is not None
    assert tombstone.name == oldest

    call = partial(CliRunner().invoke, app)
    for name in (
        f"tried:{newest}",
        str(paths.checkpoint(newest)),
        str(paths.latest),
        str(real / "checkpoints" / newest),
        str(real / "checkpoints" / "latest"),
    ):
        done = call(["verify", name, "--root", str(paths.directory.parent), "--json"])
        assert done.exit_code == 0, done.output
    assert len(run.events(EventKind.VERIFIED)) == 5
    exported = tmp_path / "exported.safetensors"
    here = str(real / "checkpoints" / "latest")
    done = call(["export", here, "--to", "safetensors", "--output", str(exported), "--json"])
    assert done.exit_code == 0, done.output
    assert len(run.events(EventKind.EXPORTED)) == 1
    assert find_directory(real / "checkpoints" / "latest") == paths.checkpoint(newest)

    done = call(["reindex", str(paths.directory.parent)])
    assert done.exit_code == 0, done.output
    with open_database() as database:
        found, name = find_checkpoint(database, str(real / "checkpoints" / newest))
    assert (found.paths, name) == (paths, newest)


@pytest.mark.more
def test_directory_that_is_gone_is_named(run: LocalRun, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "large")
    try:
        run.submit()
        ended = run.wait_for_end()
    finally:
        run.end_all()
    assert ended.state is AttemptState.NODE_FAILED
    where = f"cannot use the root {run.paths.checkpoints.readlink()} "
    assert where in ended.evidence[0], ended.evidence
    assert "files cannot be written there" in ended.evidence[0]


def test_directory_that_cannot_be_written_is_refused(run: LocalRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpoint = run.spec.checkpoint.model_copy(update={"directory": str(tmp_path / "file" / "x")})
    spec = run.spec.model_copy(update={"checkpoint": checkpoint})
    with pytest.raises(PreflightError, match=r"checkpoint\.directory .*cannot write there"):
        preflight.check(spec, tmp_path / "root")


def test_link_of_another_user_leads_nowhere_unless_its_target_is_theirs(
    run: LocalRun, tmp_path: Path
) -> None:
    paths = run.paths
    name = "step-00000001.a0001.l01"
    paths.checkpoint(name).mkdir()
    real = paths.checkpoints.readlink()
    assert [str(one) for one in paths.list_checkpoint_names()] == [name]
    for path in (paths.directory, paths.checkpoints, real, paths.tombstones):
        os.chown(path, NOBODY, -1, follow_symlinks=False)
    assert [str(one) for one in paths.list_checkpoint_names()] == [name], "all is that user's"
    with pytest.raises(ForeignFileError), hold(paths):
        pass
    os.chown(real, os.geteuid(), -1)
    assert paths.list_checkpoint_names() == [], "that user's link leads to a folder of this user"
    with reading(paths.checkpoint(name)) as is_leased:
        assert not is_leased
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "run").symlink_to(paths.directory)
    (hostile / "checkpoints").mkdir()
    assert plain_checkpoint(hostile / "checkpoints" / name).is_relative_to(hostile)


def test_deletion_reads_the_clock_of_the_storage(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    with hold(run.paths) as held:
        assert abs(storage_time(held.checkpoints) - now) < 60.0
