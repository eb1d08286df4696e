"""Two nodes that write to their local disks, and a mirror that has the files of both.

As on real nodes, the disk has the same path everywhere: each torchrun has its own mount namespace
with a different folder at that path.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.process.local_runs import wait_until
from tests.process.test_session import ends_of
from tests.process.test_session_agent import WAIT_S, end, start_nodes
from tests.support.storage import small_storage

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.mirrors import Tiers, checkpoint_folder, read_record
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.environment import CHECKPOINT_INTERVAL
from holdfast.contracts.records.history import load_events

pytestmark = pytest.mark.slow

STEPS, INTERVAL = 60, 20
LEFT_BYTES = 4096


def of_kind(run: RunPaths, kind: EventKind) -> list[Event]:
    return [event for event in load_events(run) if event.kind is kind]


def train(run: RunPaths, tiers: Tiers, disks: Sequence[Path], filler: Path) -> None:
    """One launch on two nodes; `filler` is deleted once a save has failed for lack of space."""
    mounted = 'mount --bind "$0" "$1" && shift && exec "$@"'
    Path(tiers.local).mkdir(exist_ok=True)
    for disk in disks:
        disk.mkdir()
    wrappers = [
        ("unshare", "--mount", "sh", "-c", mounted, str(disk), tiers.local) for disk in disks
    ]
    env = {CHECKPOINT_INTERVAL: str(INTERVAL), **tiers.to_environment()}
    nodes = start_nodes(run, env, wrappers, steps=STEPS, sleep_s=0.1)
    try:
        if filler.exists():
            wait_until(lambda: of_kind(run, EventKind.SAVE_FAILED), "a save that fails", WAIT_S)
            assert [d for d in run.list_checkpoints() if read_manifest(d)] == []
            filler.unlink()
        assert [node.wait(WAIT_S) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            end(node)


def test_full_disk_on_one_node_fails_the_save_and_other_nodes_fetch_files(
    tmp_path: Path,
) -> None:
    run, mirror = RunPaths(tmp_path / "run"), tmp_path / "mirror"
    tiers = Tiers(mirror=f"file://{mirror}", local=str(tmp_path / "local"))
    with small_storage(tmp_path, "4m") as small:
        filler = small / "filler"
        with open(filler, "wb") as stream:
            facts = os.statvfs(small)
            stream.write(bytes(facts.f_bavail * facts.f_frsize - LEFT_BYTES))
        disks = [tmp_path / "disk0", small / "disk1"]
        train(run, tiers, disks, filler)

        failed = of_kind(run, EventKind.SAVE_FAILED)
        assert failed[0].data["step"] == INTERVAL
        assert "node 1: [Errno 28] No space left on device" in failed[0].data["error"]
        lost = str(failed[0].data["checkpoint"])
        for node in (0, 1):
            log = run.attempt(0).flusher_log(node).read_text()
            assert f"{lost} is not committed" in log
        newest = run.list_checkpoints()[-1]
        manifest = read_manifest(newest)
        assert manifest is not None
        assert manifest.step == STEPS, "training went on, and the last save was committed"
        # The launch has ended, so all copies are complete.
        assert read_record(newest) is not None
        (place,) = mirror.iterdir()
        assert find_damage(place / checkpoint_folder(manifest.name), manifest) == []
        assert not (place / checkpoint_folder(lost) / "manifest.json").exists()
        on_disks = [
            {file.name for file in RunPaths(disk / place.name).checkpoint(manifest.name).iterdir()}
            for disk in disks
        ]
        assert on_disks[1] == {"__1_0.distcp"}, "each node must have only its own files"
        assert "__0_0.distcp" in on_disks[0] - on_disks[1]

    others = [tmp_path / "other0", tmp_path / "other1"]
    train(run, tiers, others, filler)
    resumed = of_kind(run, EventKind.RESUMED)[-1]
    assert (resumed.data["step"], resumed.data["checkpoint"]) == (STEPS, manifest.id)
    assert {event.data["step"] for event in of_kind(run, EventKind.FETCHED)} == {STEPS}
    for rank, disk in enumerate(others):
        fetched = RunPaths(disk / place.name).checkpoint(manifest.name)
        assert find_damage(fetched, manifest) == []
        before, after = ends_of(run, rank)
        assert before["weights"] == after["weights"]
    assert list(Path(tiers.local).iterdir()) == [], "all files must be on the mounted disks"
