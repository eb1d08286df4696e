"""A run with mirrored checkpoints: saved, killed, and resumed on a machine without them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.mirrors import read_record
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.environment import CHECKPOINT_LOCAL, CHECKPOINT_MIRROR
from holdfast.contracts.records.history import load_events

PROGRAM = Path(__file__).with_name("session_program.py")
WAIT_S = 150.0


def train(run: Path, steps: int, tiers: dict[str, str], *, is_ok: bool = True, **more: Any) -> str:
    """Launch the small program once up to `steps`; returns its output."""
    settings = {"steps": steps, "directory": str(run), **more}
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    done = forked.run(
        [sys.executable, PROGRAM, json.dumps(settings)],
        env={**env, "HOLDFAST_CHECKPOINT_INTERVAL": "2", "OMP_NUM_THREADS": "1", **tiers},
        timeout=WAIT_S,
    )
    assert (done.returncode == 0) is is_ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def mirrored_steps(run: Path) -> list[int]:
    events = load_events(RunPaths(run))
    return sorted(e.data["step"] for e in events if e.kind is EventKind.MIRRORED)


def copies_of(mirror: Path, step: int) -> Path:
    return next(mirror.glob(f"run.*/checkpoints/step-{step:08d}.*"))


def test_run_resumes_from_the_mirror_without_local_checkpoints(tmp_path: Path) -> None:
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    tiers = {CHECKPOINT_MIRROR: f"file://{mirror}"}
    train(run, 6, tiers)
    paths = RunPaths(run)
    assert mirrored_steps(run)[-1] == 6, "the session must wait for the copy"
    assert all(read_record(directory) for directory in paths.list_checkpoints())
    manifest = read_manifest(copies_of(mirror, 6))
    assert manifest is not None
    assert find_damage(copies_of(mirror, 6), manifest) == []
    # Deleted locally: it is fetched from the mirror and counts like any other.
    shutil.rmtree(paths.checkpoints)
    said = train(run, 8, tiers)
    assert "continues after step 6" in said
    assert manifest.name in {p.name for p in paths.list_checkpoints()}
    assert find_damage(paths.checkpoint(manifest.name), manifest) == []
    fetched = [e.data for e in load_events(paths) if e.kind is EventKind.FETCHED]
    assert [(one["step"], one["bytes"]) for one in fetched] == [(6, manifest.bytes)]
    # Damaged locally, good in the mirror: the good copy is used and the bad one is kept.
    newest = paths.list_checkpoints()[-1]
    file = next(newest.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    said = train(run, 10, tiers)
    assert "continues after step 8" in said
    assert f"skipped {newest.name}: damaged" in said
    assert (paths.fetched / newest.name / "manifest.json").exists()
    # The mirror copy is incomplete: an uncommitted copy is not used.
    (copies_of(mirror, 10) / "manifest.json").unlink()
    shutil.rmtree(paths.checkpoints)
    said = train(run, 12, tiers)
    assert "continues after step 8" in said
    assert "in the mirror: never committed there" in said


@pytest.mark.more
def test_run_does_not_start_over_while_the_mirror_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("not a directory")
    tiers = {CHECKPOINT_MIRROR: f"no-such-scheme://{tmp_path}/mirror"}
    said = train(tmp_path / "run", 4, tiers, is_ok=False)
    assert "the mirror's contents are unknown" in said
    assert not (tmp_path / "run" / "records").exists()


@pytest.mark.more
def test_files_are_written_to_the_local_disk_first(tmp_path: Path) -> None:
    run, mirror, scratch = tmp_path / "run", tmp_path / "mirror", tmp_path / "scratch"
    tiers = {CHECKPOINT_MIRROR: f"file://{mirror}", CHECKPOINT_LOCAL: str(scratch)}
    train(run, 6, tiers)
    paths = RunPaths(run)
    assert mirrored_steps(run)[-1] == 6
    name = paths.list_checkpoints()[-1].name
    assert sorted(os.listdir(paths.checkpoint(name))) == ["manifest.json", "mirrored.json"]
    on_node = RunPaths(next(scratch.iterdir()))
    assert (on_node.checkpoint(name) / "train_state.json").exists()
    assert len(on_node.list_checkpoints()) <= 3, "old copies on the node's disk must be deleted"
    # On the same node the files on its disk are used, and nothing is fetched.
    assert "continues after step 6" in train(run, 8, tiers)
    assert not [e for e in load_events(paths) if e.kind is EventKind.FETCHED]
    # Another node has none of the files.
    shutil.rmtree(scratch)
    assert "continues after step 8" in train(run, 10, tiers)
    assert [e.data["step"] for e in load_events(paths) if e.kind is EventKind.FETCHED] == [8]
