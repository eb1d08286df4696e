"""Damage that was found is remembered, shown everywhere, and refused as a source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.unit.test_cli import ended_run, write_spec
from torch import nn

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.contracts.records.checkpoint_choice import newest_of_branch
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.records.known_damage import damaged_checkpoints
from holdfast.trainer.loading.checkpoint import load_checkpoint
from holdfast.trainer.loading.resume import choose
from holdfast.workers.checkpoints.retention import plan_run

__all__ = ["ended_run"]

DATA = "__0_0.distcp"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def states(call: Call) -> list[str]:
    return [one["state"] for one in call("checkpoints", "kelp", "--json").json]


def test_damage_that_verify_found_is_remembered(
    call: Call, ended_run: RunPaths, root: Path, tmp_path: Path
) -> None:
    older, newer = ended_run.list_checkpoints()
    flip(newer / DATA)
    assert call("verify", f"kelp:{newer.name}").status == 1

    # Shown in each place.
    assert states(call) == ["committed", "damaged"]
    row = call("checkpoints", "kelp", "--json").json[1]
    assert "damaged: verify found damage: __0_0.distcp: checksum" in row["reason"]
    shown = call("show", "kelp")
    assert f"kelp:{newer.name} is damaged, so nothing starts from it: verify" in shown.out
    assert call("reindex", root).status == 0
    assert states(call) == ["committed", "damaged"]

    # Refused as a source, before anything is made, with the way out.
    spec = write_spec(tmp_path, name="other")
    for arguments in (
        ("fork", f"kelp:{newer.name}", "--spec", spec),
        ("export", f"kelp:{newer.name}", "--to", "torch", "-o", tmp_path / "x.pt"),
    ):
        refused = call(*arguments)
        assert refused.status == 1, refused
        assert "verify found damage: __0_0.distcp: checksum" in refused.err
        assert f"holdfast verify kelp:{newer.name}" in refused.err
    assert not (root / "other").exists()
    with pytest.raises(DamagedCheckpointError, match="verify found damage"):
        load_checkpoint(newer, nn.Linear(2, 2))

    # Passed over by a resume, by `latest` and by the keep rules.
    choice = choose(ended_run)
    assert choice.directory == older
    assert choice.skipped[0].startswith(f"{newer.name}: damaged: {DATA}: checksum")
    assert newest_of_branch(ended_run, load_tallied(ended_run)).name == older.name
    assert all(one.is_kept for one in plan_run(ended_run))

    # Files that were restored count again once they are verified; a resume looks itself.
    flip(newer / DATA)
    assert choose(ended_run).directory == newer
    assert call("verify", f"kelp:{newer.name}").status == 0
    assert states(call) == ["committed", "committed"]
    assert newest_of_branch(ended_run, load_tallied(ended_run)).name == newer.name


def test_a_resume_marks_only_damage(ended_run: RunPaths) -> None:
    one, two = (path.name for path in ended_run.list_checkpoints())

    def resumed(*skipped: str, checkpoint: str | None = None) -> dict[str, str]:
        with JournalWriter(ended_run.journal_of("tests")) as journal:
            journal.append(EventKind.RESUMED, checkpoint=checkpoint, skipped=list(skipped))
        return damaged_checkpoints(load_tallied(ended_run).events)

    assert resumed(f"{one}: excluded by a rollback", f"{two}: never committed") == {}
    assert resumed(f"{one}: unreadable: {DATA}: cannot be read: Input/output error") == {}
    line = f"{two}: damaged: {DATA}: missing"
    assert resumed(line) == {two: line}
    assert resumed(checkpoint=f"kelp:{two}") == {}


def test_a_copy_is_called_by_its_own_path(call: Call, ended_run: RunPaths, tmp_path: Path) -> None:
    _, original = ended_run.list_checkpoints()
    identity = f"kelp:{original.name}"
    named = tmp_path / "best-of-june"
    same = tmp_path / "kept" / original.name
    for copy in (named, same):
        shutil.copytree(original, copy)
        found = call("verify", copy, "--json")
        assert found.status == 0, found
        assert found.json["checkpoint"] == str(copy)
        assert found.json["copy_of"] == identity
        assert f"a copy of {identity}" in call("verify", copy).out
        flip(copy / DATA)
        found = call("verify", copy, "--json")
        assert found.status == 1
        assert found.json["checkpoint"] == str(copy)
    # The original is not blamed for its copies.
    assert states(call) == ["committed", "committed"]
    folder = call("verify", ended_run.directory)
    assert folder.status == 3
    assert "the folder of run kelp, not a checkpoint" in folder.err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "not a checkpoint of Holdfast" in call("verify", empty).out
