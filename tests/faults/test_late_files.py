"""Files of other nodes that appear late on shared storage: how long they are awaited."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.faults.saves import has_manifest, name_of
from tests.faults.test_lost_node import part_of
from tests.support.slot_tables import make_table

from holdfast.contracts.disk import filesystems
from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes
from holdfast.contracts.disk.filesystems import CACHE_MARGIN_S, CACHE_S, LOCAL_DELAY_S, FileSystem
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.paths import PARTS, RunPaths
from holdfast.contracts.environment import FLUSH_TIMEOUT
from holdfast.contracts.errors import SaveError
from holdfast.trainer.flusher import commit, hints, salvage
from holdfast.trainer.flusher.commit import PeerState, commit_together, part_name
from holdfast.trainer.flusher.salvage import LISTS_WAIT_S, SalvagePlace, agree
from holdfast.trainer.flusher.shards import launch_folder

NETWORK = FileSystem("nfs4", "rw")
DELAYS = [
    pytest.param(FileSystem("ext4", "rw"), LOCAL_DELAY_S, id="local"),
    pytest.param(NETWORK, CACHE_S + CACHE_MARGIN_S, id="network"),
    pytest.param(FileSystem("nfs4", "rw,acdirmax=300"), 300.0 + CACHE_MARGIN_S, id="long"),
]


class FakeClock:
    """A clock that only `sleep` advances; at `at_s` the file at `path` appears."""

    def __init__(self, at_s: float, path: Path, content: object) -> None:
        self.now, self._at_s, self._path, self._content = 0.0, at_s, path, content
        self.time = time.time

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        # Real polling is twenty times a second; one step per second is enough here.
        self.now += max(seconds, 1.0)
        if self.now >= self._at_s and not self._path.exists():
            write_bytes(self._path, to_json(self._content))


def play(monkeypatch: pytest.MonkeyPatch, mounted: FileSystem, clock: FakeClock) -> None:
    monkeypatch.setattr(filesystems, "filesystem_of", lambda _: mounted)
    monkeypatch.setattr(commit, "time", clock)
    monkeypatch.setattr(salvage, "time", clock)
    monkeypatch.setattr(hints, "time", clock)


def commit_of_two(
    folder: Path, seen_at_s: float, mounted: FileSystem, patch: pytest.MonkeyPatch, lost: list[int]
) -> Manifest:
    """Node 0 commits a step of two nodes; the part of node 1 appears at `seen_at_s`."""
    run = RunPaths(folder)
    directory = run.checkpoint(name_of(1))
    make_directory(directory / PARTS)
    play(patch, mounted, FakeClock(seen_at_s, directory / PARTS / part_name(1), part_of(1, 2)))
    peers = PeerState(abandoned=lambda: None, lost=lambda: lost)
    return commit_together(run, directory, part_of(0, 2), peers)


@pytest.mark.parametrize(("mounted", "delay_s"), DELAYS)
def test_part_of_a_lost_node_is_awaited_for_the_file_system_delay(
    mounted: FileSystem, delay_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_of_two(tmp_path / "in-time", delay_s - 2, mounted, monkeypatch, [1]).step == 1
    assert has_manifest(tmp_path / "in-time", 1)
    with pytest.raises(SaveError, match=r"nodes \[1\] were lost before they wrote all"):
        commit_of_two(tmp_path / "late", delay_s + 3, mounted, monkeypatch, [1])
    assert not has_manifest(tmp_path / "late", 1)


@pytest.mark.parametrize("timeout_s", [100, 2400])
def test_part_of_a_live_node_is_awaited_for_the_flush_timeout(
    timeout_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLUSH_TIMEOUT, str(timeout_s))
    assert commit_of_two(tmp_path / "in-time", timeout_s - 2, NETWORK, monkeypatch, []).step == 1
    with pytest.raises(
        SaveError, match=rf"wrote no parts within {timeout_s} s.*all nodes mount the same directory"
    ):
        commit_of_two(tmp_path / "late", timeout_s + 3, NETWORK, monkeypatch, [])


@pytest.mark.parametrize(("mounted", "delay_s"), DELAYS)
def test_snapshot_list_is_awaited_for_the_file_system_delay(
    mounted: FileSystem, delay_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def common_step(run: RunPaths, seen_at_s: float) -> int | None:
        theirs = salvage._list_path(launch_folder(run, name_of(1)), 1)
        clock = FakeClock(seen_at_s, theirs, {"node": 1, "steps": [6, 7]})
        play(monkeypatch, mounted, clock)
        table = make_table(nodes=2, checkpoint=name_of(1), run_directory=str(run.directory))
        return agree(SalvagePlace.of(table), [7, 8], abandoned=lambda: None).step

    longest_s = LISTS_WAIT_S + delay_s
    assert common_step(RunPaths(tmp_path / "in-time"), longest_s - 2) == 7
    with pytest.raises(SaveError, match=r"nodes \[1\] did not list their snapshots within"):
        common_step(RunPaths(tmp_path / "late"), longest_s + 3)
