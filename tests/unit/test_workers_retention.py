"""Retention: every verdict has a reason, and no race with a reader or pin deletes too much."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import re
import stat
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import T0, RunFolder
from tests.support.storage import small_storage

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind, journal_lock
from holdfast.contracts.disk.leases import reading
from holdfast.contracts.disk.manifest import committed_checkpoints, read_manifest
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.records.history import load_history, pinned_checkpoints
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.checkpoints import deletion, retention
from holdfast.workers.checkpoints.retention import Facts
from holdfast.workers.runs import operator

STEPS = (10, 20, 30, 40)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path, "kept", "k" * 32, {"checkpoint": {"keep": {"last": 2}}})
    for made in (run.paths.journal, run.paths.tombstones):
        make_directory(made)
    for step in STEPS:
        run.commit(step, 1, at=T0 + step)
    return run


def names(paths: RunPaths) -> list[str]:
    return [manifest.name for manifest in committed_checkpoints(paths)]


def name_of(step: int) -> str:
    return f"step-{step:08d}.a0001.l01"


def reason_for(step: int, reason: str = "") -> dict[str, str]:
    return {name_of(step): reason}


@pytest.mark.parametrize(
    ("keep", "facts", "reasons"),
    [
        (Keep(), {}, ["all", "all", "all", "the newest, all"]),
        (
            Keep(last=1),
            {},
            *[[*["-not among the last 1"] * 3, "the newest, last 1"]],
        ),
        (
            Keep(last=1),
            {"pins": [name_of(10)], "in_use": reason_for(20, "the parent of run b")},
            ["pinned", "the parent of run b", "-not among the last 1", "the newest, last 1"],
        ),
        (
            Keep(last=1),
            {"read": reason_for(30, "node7-1-1")},
            [*["-not among the last 1"] * 2, "being read by node7-1-1", "the newest, last 1"],
        ),
        # Rolled-back and damaged checkpoints count for no rule; a damaged one is kept.
        (
            Keep(last=1),
            {"excluded": [name_of(40)]},
            [*["-not among the last 1"] * 2, "the newest, last 1", "-rolled back"],
        ),
        (
            Keep(last=1),
            {"damaged": reason_for(40, "a: 0 bytes")},
            [
                *["-not among the last 1"] * 2,
                "the newest, last 1",
                "damaged, kept for inspection: a: 0 bytes",
            ],
        ),
        # A time to live keeps the newest checkpoint at any age.
        (Keep(ttl="1s"), {}, [*["-older than 1s"] * 3, "the newest"]),
        # With a mirror, a checkpoint is kept until a newer one has a second copy.
        (
            Keep(last=1),
            {"mirrored": [name_of(10), name_of(20)]},
            [
                "-not among the last 1",
                *["needed until a newer checkpoint has a second copy"] * 2,
                "the newest, last 1",
            ],
        ),
        (
            Keep(last=1),
            {"mirrored": []},
            [*["needed until a newer checkpoint has a second copy"] * 3, "the newest, last 1"],
        ),
        (
            Keep(last=1),
            {"mirrored": [name_of(40)]},
            [*["-not among the last 1"] * 3, "the newest, last 1"],
        ),
    ],
)
def test_each_checkpoint_is_kept_or_deleted_with_its_reason(
    folder: RunFolder, keep: Keep, facts: dict[str, Any], reasons: list[str]
) -> None:
    """A reason with a minus marks a checkpoint to delete."""
    manifests = committed_checkpoints(folder.paths)
    plan = retention.plan_prune(manifests, keep=keep, facts=Facts(**facts), now=T0 + 1000)
    assert [f"{'' if one.is_kept else '-'}{one.reason}" for one in plan] == reasons
    assert [(one.step, one.bytes) for one in plan] == [(m.step, m.bytes) for m in manifests]


def test_a_prune_is_journaled_and_leaves_tombstones(folder: RunFolder) -> None:
    paths = folder.paths
    operator.pin(paths, name_of(10), by="ann", note="paper")
    content = (paths.checkpoint(name_of(20)) / MANIFEST).read_bytes()
    assert [one.name for one in deletion.apply(paths, by="ann")] == [name_of(20)]
    assert names(paths) == [name_of(step) for step in (10, 30, 40)]
    assert paths.tombstone(name_of(20)).read_bytes() == content
    assert sorted(p.name for p in paths.checkpoints.iterdir()) == names(paths)
    event = next(e for e in load_history(paths).events if e.kind == "checkpoint_deleted")
    assert (event.data["reason"], event.data["by"]) == ("not among the last 2", "ann")
    assert deletion.apply(paths, by="ann") == []


def test_a_protected_checkpoint_is_kept_with_the_reason(folder: RunFolder) -> None:
    paths = folder.paths
    name = name_of(10)

    def prune() -> dict[str, str]:
        deleted = {one.name for one in deletion.apply(paths, by="ann")}
        assert deleted.isdisjoint(names(paths))
        return {one.name: one.reason for one in retention.plan_run(paths) if one.is_kept}

    assert operator.pin(paths, name, by="ann") == f"kept:{name}"
    assert prune()[name] == "pinned"
    operator.unpin(paths, name, by="ann")
    assert pinned_checkpoints(load_history(paths).events) == frozenset()
    with pytest.raises(SpecError, match="not pinned"):
        operator.unpin(paths, name, by="ann")
    with reading(paths.checkpoint(name)):
        assert re.fullmatch(rf"being read by .*-{os.getpid()}-\d+", prune()[name])
    kept = prune()
    assert name not in kept
    assert kept[name_of(40)].startswith("the newest")
    with pytest.raises(NotFoundError):
        operator.pin(paths, name, by="ann")


def test_parents_of_live_attempts_of_forks_and_of_exports_are_in_use(
    folder: RunFolder, tmp_path: Path
) -> None:
    paths = folder.paths
    folder.submit(2, 1, T0 + 50)
    folder.launch(2, 1, 10, f"kept:{name_of(10)}")
    folder.launch(2, 2, 20, f"kept:{name_of(20)}")
    folder.tell("cli", EventKind.FORKED, checkpoint=f"kept:{name_of(30)}", into_run="b")
    exported = {"checkpoint": name_of(40), "format": "torch", "path": str(tmp_path / "out.pt")}
    folder.tell("cli", EventKind.EXPORTED, **exported)
    uses = retention.checkpoints_in_use(load_history(paths))
    # The second launch resumed from another checkpoint than the first.
    assert uses == {
        name_of(20): "the checkpoint that attempt 2 resumed from",
        name_of(30): "the parent of run b",
    }
    (tmp_path / "out.pt").touch()
    folder.finish(2, AttemptState.PREEMPTED, Cause.PREEMPTION, 20, T0 + 90)
    uses = retention.checkpoints_in_use(load_history(paths))
    assert set(uses) == {name_of(30), name_of(40)}


def test_damaged_checkpoints_are_kept_and_named(folder: RunFolder) -> None:
    paths = folder.paths
    torn = next(p for p in paths.checkpoint(name_of(40)).iterdir() if p.suffix == ".distcp")
    torn.write_bytes(b"")
    (paths.checkpoint(name_of(20)) / MANIFEST).write_bytes(b"{}")
    plan = {one.name: one for one in retention.plan_run(paths)}
    assert plan[name_of(40)].reason.startswith(
        "damaged, kept for inspection: __0_0.distcp: 0 bytes"
    )
    assert plan[name_of(20)].reason.startswith("damaged, kept for inspection: manifest.json")
    # The torn checkpoint is not the newest and does not count among the last two.
    assert deletion.apply(paths, by="ann") == []
    assert plan[name_of(30)].reason == "the newest, last 2"
    assert len(paths.list_checkpoints()) == 4


def test_an_interrupted_deletion_is_finished_later(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = folder.paths
    # Killed after the manifest became the tombstone: the deletion could still have been undone.
    os.rename(paths.checkpoint(name_of(10)) / MANIFEST, paths.tombstone(name_of(10)))
    # Killed while it deleted the files.
    os.rename(paths.checkpoint(name_of(20)) / MANIFEST, paths.tombstone(name_of(20)))
    os.rename(paths.checkpoint(name_of(20)), paths.removing(name_of(20)))
    deletion.finish_deletions(paths)
    assert not paths.removing(name_of(20)).exists()
    assert paths.checkpoint(name_of(10)).is_dir()
    monkeypatch.setattr(deletion, "UNDECIDED_S", 0.0)
    with reading(paths.checkpoint(name_of(10))):
        deletion.finish_deletions(paths)
        assert paths.checkpoint(name_of(10)).is_dir()
    deletion.finish_deletions(paths)
    assert sorted(p.name for p in paths.checkpoints.iterdir()) == [name_of(30), name_of(40)]


def test_uncommitted_saves_of_ended_attempts_are_deleted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = folder.paths
    folder.submit(1, 1, T0)
    folder.submit(2, 1, T0)
    for step, attempt in ((50, 1), (60, 2)):
        torn = paths.checkpoint(f"step-{step:08d}.a{attempt:04d}.l01")
        torn.mkdir()
        (torn / "__0_0.distcp").write_bytes(b"x" * 5000)
    folder.record_attempt_end(1, AttemptState.FAILED, Cause.HANG, 50, T0)
    assert deletion.remove_torn(paths) == 0, "another process may still delete or write there"
    monkeypatch.setattr(deletion, "UNDECIDED_S", -1.0)
    assert deletion.remove_torn(paths) >= 5000
    assert not paths.checkpoint(name_of(50)).exists()
    assert paths.checkpoint("step-00000060.a0002.l01").exists(), "attempt 2 is still live"
    assert len(names(paths)) == 4


def test_space_that_was_freed_lately_counts_by_the_clock_of_the_storage(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose clock was an hour ahead did not see what another process had just freed."""
    assert deletion.apply(folder.paths, by="ann")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
    assert deletion.free_space(folder.paths, writer="flow")[0] > 0


@pytest.mark.root
def test_a_full_disk_can_be_pruned_and_the_deletion_journaled(tmp_path: Path) -> None:
    """On a really full file system: the journal line is written once there is space."""
    with small_storage(tmp_path, "256k") as root:
        run = RunFolder(root, "kept", "k" * 32, {"checkpoint": {"keep": {"last": 1}}})
        for made in (run.paths.journal, run.paths.tombstones):
            make_directory(made)
        for step in STEPS:
            run.commit(step, 1)
        with contextlib.suppress(OSError), open(root / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 1024)
        assert len(deletion.apply(run.paths, by="a full disk", writer="agent")) == 3
        assert names(run.paths) == [name_of(40)]
        journaled = [
            e.data["checkpoint"] for e in load_history(run.paths).events if "reason" in e.data
        ]
        assert {p.stem for p in run.paths.tombstones.iterdir()} == {name_of(s) for s in STEPS[:3]}
        assert sorted(journaled) == [name_of(step) for step in STEPS[:3]]


def _delete_all(root: str, writer: str, ready: Barrier) -> None:
    ready.wait(60)
    deletion.apply(RunPaths(Path(root)), by=writer, writer=writer)


def test_two_concurrent_prunes_delete_each_checkpoint_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "kept", "k" * 32, {"checkpoint": {"keep": {"last": 1}}})
    for step in range(1, 41):
        run.commit(step, 1)
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(2)
    deleters = [
        context.Process(target=_delete_all, args=(str(run.paths.directory), writer, ready))
        for writer in ("flow", "agent-0000")
    ]
    for deleter in deleters:
        deleter.start()
    for deleter in deleters:
        deleter.join(120)
    assert [deleter.exitcode for deleter in deleters] == [0, 0]
    assert [p.name for p in run.paths.checkpoints.iterdir()] == [name_of(40)]
    assert len(list(run.paths.tombstones.iterdir())) == 39
    journaled = {
        event.data["checkpoint"]
        for event in load_history(run.paths).events
        if event.kind is EventKind.CHECKPOINT_DELETED
    }
    assert journaled == {name_of(step) for step in range(1, 40)}


@contextlib.contextmanager
def paused_deletion(run: RunFolder, name: str) -> Iterator[None]:
    """Another process that deletes `name`, paused after its first check for readers and pins.

    It waits for its journal, which is locked here until the block ends; then it continues.
    """
    journal = run.paths.journal_of("deleter")
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(2)
    deleter = context.Process(target=_delete_one, args=(str(run.paths.directory), name, ready))
    # Started before the journal is opened, so that it inherits no handle of it.
    deleter.start()
    journal.parent.mkdir(exist_ok=True)
    with open(journal_lock(journal), "a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        ready.wait(60)
        give_up = time.monotonic() + 60
        while not _writes_to(deleter.pid, journal):
            assert time.monotonic() < give_up
            time.sleep(0.002)
        yield
    deleter.join(60)
    assert deleter.exitcode == 0


def _writes_to(process: int | None, path: Path) -> bool:
    """True when a process has the file open for writing."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        # A handle may be closed while its link is read.
        with contextlib.suppress(FileNotFoundError):
            if link.lstat().st_mode & stat.S_IWUSR and os.path.samefile(link, path):
                return True
    return False


def _delete_one(directory: str, name: str, ready: Barrier) -> None:
    ready.wait(60)
    paths = RunPaths(Path(directory))
    with deletion._held(paths) as held:
        deletion._delete(held, name, reason="a race", by="test", writer="deleter")


def test_a_reader_that_starts_during_a_deletion_keeps_the_checkpoint(folder: RunFolder) -> None:
    directory = folder.paths.checkpoint(name_of(10))
    with contextlib.ExitStack() as held:
        with paused_deletion(folder, name_of(10)):
            held.enter_context(reading(directory))
            manifest = read_manifest(directory)
            assert manifest is not None
        assert find_damage(directory, manifest) == []
        assert read_manifest(directory) == manifest
        assert not folder.paths.tombstone(name_of(10)).exists()
    notes = [e.data["text"] for e in load_history(folder.paths).events if e.kind == "note"]
    assert len(notes) == 1
    assert notes[0].startswith(f"{name_of(10)} was not deleted: it is being read by ")
    with paused_deletion(folder, name_of(10)):
        assert directory.is_dir()
    assert not directory.exists()


def test_a_pin_during_a_deletion_keeps_the_checkpoint(folder: RunFolder) -> None:
    with paused_deletion(folder, name_of(10)):
        operator.pin(folder.paths, name_of(10), by="ann")
    assert names(folder.paths) == [name_of(step) for step in STEPS]


def _read_repeatedly(directory: str, ready: Barrier, answers: Any) -> None:
    """A reader: a checkpoint found committed under its lease must stay whole until the release."""
    path = Path(directory)
    ready.wait(60)
    whole = 0
    while True:
        with reading(path):
            manifest = read_manifest(path)
            if manifest is not None:
                time.sleep(0.02)
                damage = find_damage(path, manifest)
                if damage:
                    answers.put(f"lost: {damage}")
                    return
                whole += 1
        if not path.exists():
            answers.put(whole)
            return
        time.sleep(0.005)


def test_a_checkpoint_is_never_deleted_while_it_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "kept", "k" * 32, {"checkpoint": {"keep": {"last": 1}}})
    for step in range(1, 9):
        run.commit(step, 1)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    for step in range(1, 8):
        ready = context.Barrier(2)
        directory = run.paths.checkpoint(name_of(step))
        reader = context.Process(target=_read_repeatedly, args=(str(directory), ready, answers))
        reader.start()
        ready.wait(60)
        give_up = time.monotonic() + 60
        while directory.exists():
            deletion.apply(run.paths, by="test")
            assert time.monotonic() < give_up
        assert isinstance(answers.get(timeout=60), int)
        reader.join(60)
    assert names(run.paths) == [name_of(8)]
