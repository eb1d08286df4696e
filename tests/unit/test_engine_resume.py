"""Which checkpoint a run resumes from: the newest that verifies; skipped ones are reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.runs import file_checksum

from holdfast.contracts.disk.durable import to_json
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.records.documents import RunRecord, write_document
from holdfast.trainer.loading.resume import choose


def commit(
    run: RunPaths, step: int, attempt: int = 1, launch: int = 1, uid: str = "0" * 32
) -> Path:
    name = CheckpointName(step, attempt, launch)
    directory = run.checkpoint(name)
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(f"{name}".encode() * 100)
    entry = FileEntry(
        path="__0_0.distcp",
        bytes=(directory / "__0_0.distcp").stat().st_size,
        checksum=file_checksum(directory / "__0_0.distcp"),
    )
    manifest = Manifest(
        run_uid=uid,
        run=run.name,
        name=str(name),
        step=step,
        attempt=attempt,
        launch=launch,
        world_size=1,
        files=(entry,),
        committed_at=1.0,
    )
    (directory / "manifest.json").write_bytes(to_json(manifest.model_dump(mode="json")))
    return directory


def write_record(run: RunPaths, *, uid: str, forked_path: str | None = None) -> None:
    run.directory.mkdir(exist_ok=True)
    record = RunRecord(
        uid=uid,
        run=run.name,
        name=run.name,
        root=str(run.directory.parent),
        created_at=1.0,
        spec={},
        spec_digest="",
        forked_path=forked_path,
    )
    write_document(run.spec, record)


def fork_from(run: RunPaths, directory: Path) -> None:
    write_record(run, uid="1" * 32, forked_path=str(directory))


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "r")


def test_a_run_without_checkpoints_resumes_from_nothing(run: RunPaths) -> None:
    choice = choose(run)
    assert (choice.directory, choice.manifest, choice.skipped) == (None, None, ())


def test_the_newest_step_wins_then_attempt_then_launch(run: RunPaths) -> None:
    for numbers in ((10, 1, 1), (30, 1, 1), (30, 2, 1), (30, 2, 2), (20, 9, 9)):
        commit(run, *numbers)
    choice = choose(run)
    assert choice.directory == run.checkpoint("step-00000030.a0002.l02")
    assert choice.manifest is not None
    assert choice.manifest.step == 30


def test_damaged_checkpoints_are_skipped_with_a_reason_and_kept(run: RunPaths) -> None:
    good = commit(run, 10)
    (commit(run, 20) / "__0_0.distcp").write_bytes(b"short")
    flipped = commit(run, 30) / "__0_0.distcp"
    flipped.write_bytes(b"X" + flipped.read_bytes()[1:])
    (commit(run, 40) / "manifest.json").write_bytes(b"{}")
    (commit(run, 50) / "manifest.json").unlink()
    (commit(run, 60) / "__0_0.distcp").unlink()
    choice = choose(run, verify=True)
    assert choice.directory == good
    assert [line.split(".")[0] for line in choice.skipped] == [
        f"step-000000{step}" for step in (60, 50, 40, 30, 20)
    ]
    said = "\n".join(choice.skipped)
    for word in ("missing", "never committed", "manifest", "checksum", "5 bytes"):
        assert word in said
    assert len(run.list_checkpoints()) == 6
    # A check of sizes alone misses the flipped bit; the load finds it and chooses again.
    assert choose(run).directory == flipped.parent
    again = choose(run, passing_over={str(flipped.parent): "damaged: as read"})
    assert again.directory == good
    assert f"{flipped.parent.name}: damaged: as read" in again.skipped


def test_the_last_fallback_checkpoint_is_fully_read_before_it_is_chosen(run: RunPaths) -> None:
    flipped = commit(run, 10) / "__0_0.distcp"
    flipped.write_bytes(b"X" + flipped.read_bytes()[1:])
    (commit(run, 5) / "__0_0.distcp").write_bytes(b"short")
    choice = choose(run)
    assert choice.directory is None
    assert [line.split(":")[0] for line in choice.skipped] == [
        "step-00000010.a0001.l01",
        "step-00000005.a0001.l01",
    ]


def test_a_manifest_of_another_run_is_skipped(run: RunPaths) -> None:
    good = commit(run, 10)
    write_record(run, uid="0" * 32)
    assert choose(run).directory == good
    strange = commit(run, 20, uid="9" * 32)
    choice = choose(run)
    assert choice.directory == good
    assert choice.skipped == (f"{strange.name}: damaged: its manifest belongs to another run, r",)


def test_checkpoints_that_a_rollback_excluded_are_skipped(run: RunPaths) -> None:
    good = commit(run, 10)
    bad = commit(run, 20)
    with JournalWriter(run.journal_of("cli")) as journal:
        journal.append(EventKind.ROLLED_BACK, to=good.name, excluded=[bad.name])
    choice = choose(run)
    assert choice.directory == good
    assert choice.skipped == (f"{bad.name}: excluded by a rollback",)


def test_a_fork_resumes_from_its_origin_until_it_has_its_own_checkpoint(
    run: RunPaths, tmp_path: Path
) -> None:
    origin = commit(RunPaths(tmp_path / "origin"), 70)
    fork_from(run, origin)
    assert choose(run).directory == origin
    own = commit(run, 71, uid="1" * 32)
    assert choose(run).directory == own


def test_a_fork_whose_origin_is_damaged_fails_instead_of_starting_over(
    run: RunPaths, tmp_path: Path
) -> None:
    origin = commit(RunPaths(tmp_path / "origin"), 70)
    fork_from(run, origin)
    (origin / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match="forked from it"):
        choose(run)


def test_a_run_starts_from_a_given_checkpoint_until_it_has_its_own(
    run: RunPaths, tmp_path: Path
) -> None:
    origin = commit(RunPaths(tmp_path / "origin"), 70)
    write_record(run, uid="1" * 32)
    assert choose(run, start_from=origin).directory == origin
    own = commit(run, 71, uid="1" * 32)
    assert choose(run, start_from=origin).directory == own


def test_a_fork_resumes_from_its_origin_and_not_from_a_given_checkpoint(
    run: RunPaths, tmp_path: Path
) -> None:
    origin = commit(RunPaths(tmp_path / "origin"), 70)
    other = commit(RunPaths(tmp_path / "other"), 90)
    fork_from(run, origin)
    assert choose(run, start_from=other).directory == origin


def test_a_damaged_checkpoint_to_start_from_is_not_left_out(run: RunPaths, tmp_path: Path) -> None:
    origin = commit(RunPaths(tmp_path / "origin"), 70)
    (origin / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match="this run starts from it"):
        choose(run, start_from=origin)


def test_resume_and_flusher_need_no_torch() -> None:
    code = (
        "import sys, holdfast.trainer.loading.resume, holdfast.trainer.ranks.identity;"
        "import holdfast.trainer.flusher.service;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
