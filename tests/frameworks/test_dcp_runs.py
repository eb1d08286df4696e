"""`holdfast.trainer.dcp` inside a run: its saves are the run's lineage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.frameworks.dcp_states import make_state
from tests.support.runs import RunFolder

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.disk.manifest import GONE, REPLACED, read_manifest
from holdfast.contracts.errors import CheckpointError
from holdfast.flows.forks import fork_run
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries.pages import list_checkpoints
from holdfast.trainer import dcp
from holdfast.trainer.dcp import channel
from holdfast.trainer.dcp.channel import DcpSaveError
from holdfast.trainer.dcp.record import RECORD
from holdfast.trainer.session.lifetime import claimed, release
from holdfast.workers.checkpoints.exports import ExportFormat, export

pytestmark = pytest.mark.usefixtures("end_flusher", "ignore_stock_hints")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """A run whose attempt 1 and launch 2 this process is."""
    folder = RunFolder(tmp_path, "tried", "a" * 32)
    for name, value in (("RUN_DIR", folder.paths.directory), ("ATTEMPT", 1), ("LAUNCH", 2)):
        monkeypatch.setenv(f"HOLDFAST_{name}", str(value))
    channel._close_all()
    monkeypatch.setattr(RECORD, "_step", 0)
    yield folder
    channel._close_all()


def checkpoints_of(run: RunFolder, folder: Path) -> list[tuple[str, str, str | None]]:
    """Return the name, the state and the parent of each checkpoint in the index, by name."""
    with open_database(f"sqlite:///{folder}/index.db") as database:
        ingest_run(database, run.paths)
        rows = list_checkpoints(database, "tried", limit=20).items
    return sorted((row["id"].partition(":")[2], row["state"], row["parent"]) for row in rows)


def test_in_a_run_each_save_is_in_its_journal_and_its_lineage(
    tmp_path: Path, run: RunFolder
) -> None:
    dcp.save(make_state(1), checkpoint_id=tmp_path / "a")
    dcp.save(make_state(2), checkpoint_id=tmp_path / "step-40")
    (tmp_path / "file").write_text("")
    with pytest.raises(DcpSaveError):
        dcp.save(make_state(3), checkpoint_id=tmp_path / "file")
    channel._close_all()
    placed = read_manifest(tmp_path / "step-40")
    assert placed is not None
    assert (placed.run, placed.run_uid) == ("tried", "a" * 32)
    assert (placed.attempt, placed.launch, placed.step) == (1, 2, 40)
    (begun, *events), _ = read_journal(run.paths.attempt(1).rank_journal)
    assert (begun.kind, begun.data["checkpoint"], begun.data["step"]) == (
        EventKind.RESUMED,
        None,
        0,
    )
    assert [(str(e.kind), e.data["step"], Path(e.data["directory"]).name) for e in events] == [
        *(("staged", 1, "a"), ("committed", 1, "a")),
        *(("staged", 40, "step-40"), ("committed", 40, "step-40")),
        *(("staged", 41, "file"), ("save_failed", 41, "file")),
    ]
    assert events[3].data["bytes"] == placed.bytes
    first, second = "step-00000001.a0001.l02", "step-00000040.a0001.l02"
    assert checkpoints_of(run, tmp_path) == [
        (first, "committed", None),
        (second, "committed", f"tried:{first}"),
    ]
    recorded = read_manifest(run.paths.checkpoint(second))
    assert recorded is not None
    assert recorded.source == str(tmp_path / "step-40")
    assert recorded.files == placed.files
    assert find_damage(run.paths.checkpoint(second), recorded) == []


def test_in_a_run_a_load_is_the_parent_of_the_next_save(
    tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a later launch, and of a directory that was renamed."""
    dcp.save(make_state(1), checkpoint_id=tmp_path / "a")
    dcp.save(make_state(2), checkpoint_id=tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "good")
    channel._close_all()
    monkeypatch.setenv("HOLDFAST_LAUNCH", "3")
    dcp.load(make_state(3), checkpoint_id=tmp_path / "good")
    dcp.save(make_state(4), checkpoint_id=tmp_path / "c")
    names = [f"step-0000000{step}.a0001.l0{launch}" for step, launch in ((1, 2), (2, 2), (3, 3))]
    assert checkpoints_of(run, tmp_path) == [
        (names[0], "deleted", None),
        (names[1], "committed", f"tried:{names[0]}"),
        (names[2], "committed", f"tried:{names[0]}"),
    ]
    channel._close_all()
    events, _ = read_journal(run.paths.attempt(1).rank_journal)
    begun = [e.data for e in events if e.kind is EventKind.RESUMED]
    assert [(data["launch"], data["checkpoint"], data["step"]) for data in begun] == [
        (2, None, 0),
        (3, f"tried:{names[0]}", 1),
    ]


def test_in_a_run_checkpoints_that_the_program_replaces_or_deletes_become_tombstones(
    tmp_path: Path, run: RunFolder
) -> None:
    dcp.save(make_state(1), checkpoint_id=tmp_path / "latest")
    dcp.save(make_state(2), checkpoint_id=tmp_path / "old")
    dcp.save(make_state(3), checkpoint_id=tmp_path / "latest")
    shutil.rmtree(tmp_path / "old")
    dcp.save(make_state(4), checkpoint_id=tmp_path / "latest")
    channel._close_all()
    states = [state for _, state, _ in checkpoints_of(run, tmp_path)]
    assert states == ["deleted", "deleted", "deleted", "committed"]
    events, _ = read_journal(run.paths.attempt(1).rank_journal)
    why = [e.data["reason"] for e in events if e.kind is EventKind.CHECKPOINT_DELETED]
    assert why == [REPLACED, GONE, REPLACED] or why == [REPLACED, REPLACED, GONE]


def test_beside_a_session_a_save_has_only_its_lines(tmp_path: Path, run: RunFolder) -> None:
    """The run's checkpoints are the session's."""
    with claimed(run, lambda: None):
        dcp.save(make_state(1), checkpoint_id=tmp_path / "a")
        release(run)
    channel._close_all()
    events, _ = read_journal(run.paths.attempt(1).rank_journal)
    assert [e.data["checkpoint"] for e in events] == [str(tmp_path / "a")] * 2
    assert run.paths.list_checkpoints() == []


def test_a_save_that_cannot_be_recorded_has_its_line_and_a_note(
    tmp_path: Path, run: RunFolder
) -> None:
    """A file is in the place of the run's checkpoints. The save itself is complete."""
    run.paths.checkpoints.parent.mkdir(parents=True, exist_ok=True)
    run.paths.checkpoints.write_text("")
    dcp.save(make_state(1), checkpoint_id=tmp_path / "a")
    channel._close_all()
    dcp.load(make_state(2), checkpoint_id=tmp_path / "a")
    channel._close_all()
    events, _ = read_journal(run.paths.attempt(1).rank_journal)
    assert [str(e.kind) for e in events] == ["resumed", "staged", "committed", "note"]
    assert events[2].data["checkpoint"] == str(tmp_path / "a")
    assert "not recorded" in events[3].data["text"]


@pytest.mark.more
def test_a_save_in_a_run_can_be_exported(tmp_path: Path, run: RunFolder) -> None:
    """The files are in the program's directory. They must be those that were recorded."""
    dcp.save({"model": make_state(1)["model"]}, checkpoint_id=tmp_path / "a")
    channel._close_all()
    (directory,) = run.paths.list_checkpoints()
    weights = tmp_path / "weights.safetensors"
    facts = export(directory, ExportFormat.SAFETENSORS, weights, writer="cli")
    assert facts["checkpoint"] == f"tried:{directory.name}"
    wanted = make_state(1)["model"]
    found = load_file(weights)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    data = tmp_path / "a" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        export(directory, ExportFormat.SAFETENSORS, tmp_path / "other", writer="cli")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"a: cannot be read: No such file"):
        export(directory, ExportFormat.SAFETENSORS, tmp_path / "other", writer="cli")
    with pytest.raises(CheckpointError, match=r"another run from it.*`holdfast import /"):
        fork_run(run.paths, directory.name, name="other", overrides=(), by="tester")
