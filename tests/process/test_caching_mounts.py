"""What one host writes, another host finds, although its cache says for a minute that it is absent.

Two mounts of one folder play two hosts. They believe names, absences and attributes for a minute.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

# Appended, so that no module of ours can shadow an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "filesystems"))

from caching_mount import mounted, set_fault
from tests.faults.saves import name_of
from tests.faults.test_lost_node import part_of
from tests.support.slot_tables import make_table

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.filesystems import filesystem_of, is_listed, is_there
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import PreflightError
from holdfast.contracts.records.documents import Claim, create_document, read_claim, read_documents
from holdfast.contracts.records.history import load_events
from holdfast.trainer.flusher.commit import PeerState, commit_alone, commit_together
from holdfast.trainer.flusher.salvage import SalvagePlace, agree
from holdfast.workers.nodes.heartbeats import HeartbeatWriter, heartbeat_stamp, read_heartbeats
from holdfast.workers.nodes.root_probe import SharedProbe, check_folder
from holdfast.workers.runs import preflight

CACHE_S = 60.0
# Far less than a cache lasts, and far more than a machine that is busy needs.
AT_ONCE_S = 20.0


@dataclass(frozen=True)
class Hosts:
    """Two hosts' views of one folder, and the control file of the faults."""

    first: Path
    second: Path
    control: Path


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    source, first, second = (tmp_path / name for name in ("server", "first", "second"))
    for folder in (source, first, second):
        folder.mkdir()
    control = tmp_path / "fault"
    with mounted(source, control, first, CACHE_S), mounted(source, control, second, CACHE_S):
        yield Hosts(first, second, control)


def test_a_name_that_was_looked_up_in_vain_is_found_when_it_is_there(hosts: Hosts) -> None:
    path = hosts.second / "there"
    assert not path.exists()
    (hosts.first / "there").write_text("x")
    assert not path.exists(), "the absence is cached, or this test shows nothing"
    assert is_there(path)
    assert path.read_text() == "x"
    assert not is_there(hosts.second / "absent")
    assert not is_there(hosts.second / "no-folder" / "absent")
    (hosts.first / "there").unlink()
    assert not is_listed(path)
    (hosts.first / "there").touch()
    assert is_listed(path)
    assert sorted(os.listdir(hosts.first)) == ["there"], "a look leaves nothing behind"


def test_a_claim_and_a_journal_line_are_seen_at_once(hosts: Hosts) -> None:
    here, there = (RunPaths(folder / "run") for folder in (hosts.first, hosts.second))
    make_directory(here.attempt(1).journal)
    with JournalWriter(here.attempt(1).node_journal(0)) as journal:
        journal.append(EventKind.NOTE, attempt=1, text="one")
        assert [event.data["text"] for event in load_events(there)] == ["one"]
        assert read_claim(there.attempt(1)) is None
        journal.append(EventKind.NOTE, attempt=1, text="two")
    claim = Claim(
        job_id="7", pid=1, process_start_s=0, boot_id="", host="h", claimed_at=time.time()
    )
    assert create_document(here.attempt(1).claim, claim)
    assert [event.data["text"] for event in load_events(there)] == ["one", "two"]
    assert read_documents(there.attempt(1)).claim == claim


def test_heartbeats_of_another_host_are_seen_as_they_change(hosts: Hosts) -> None:
    here, there = (RunPaths(folder / "run").attempt(1) for folder in (hosts.first, hosts.second))
    make_directory(here.heartbeats)
    assert read_heartbeats(there) == []
    writer = HeartbeatWriter(here)
    stamps: set[object] = set()
    for step in range(4):
        beat: dict[str, Any] = {"node": 0, "host": "h", "time": 1.0, "monotonic_s": float(step)}
        writer.write([{**beat, "attempt": 1, "launch": 1, "agent_pid": 1}] * (step + 1))
        stamps.add(heartbeat_stamp(there))
        assert {one.monotonic_s for one in read_heartbeats(there)} == {step}
        time.sleep(0.02)
    writer.close()
    assert len(stamps) == 4


def test_a_manifest_of_another_host_is_found_by_the_next_resume(hosts: Hosts) -> None:
    here, there = (RunPaths(folder / "run") for folder in (hosts.first, hosts.second))
    directory = here.checkpoint(name_of(1))
    make_directory(directory)
    seen = there.checkpoint(name_of(1))
    assert not (seen / MANIFEST).exists()
    commit_alone(here, directory, part_of(0, 1))
    assert not (seen / MANIFEST).exists(), "the absence is cached, or this test shows nothing"
    manifest = read_manifest(seen)
    assert manifest is not None
    assert manifest.step == 1


def on_both(
    hosts: Hosts, act: Callable[[RunPaths, int], object]
) -> tuple[dict[int, object], float]:
    """Run `act(run, node)` for both nodes, the second one two seconds later; results and time."""
    results: dict[int, object] = {}

    def run(node: int, folder: Path) -> None:
        results[node] = act(RunPaths(folder / "run"), node)

    threads = [
        threading.Thread(target=run, args=(node, folder))
        for node, folder in enumerate((hosts.first, hosts.second))
    ]
    began = time.monotonic()
    # Both have looked for the other's files before those exist.
    threads[1].start()
    time.sleep(2)
    threads[0].start()
    for thread in threads:
        thread.join(2 * CACHE_S)
    return results, time.monotonic() - began


def commit_on_both(hosts: Hosts) -> tuple[dict[int, object], float]:
    """Commit a step of two parts, one from each host; return the checkpoint's ids and seconds."""

    def commit(run: RunPaths, node: int) -> object:
        directory = run.checkpoint(name_of(1))
        assert read_manifest(directory) is None
        peers = PeerState(abandoned=lambda: None)
        return commit_together(run, directory, part_of(node, 2), peers).id

    return on_both(hosts, commit)


def test_two_hosts_commit_a_step_together_at_once(hosts: Hosts) -> None:
    results, seconds = commit_on_both(hosts)
    assert len(set(results.values())) == 1
    assert len(results) == 2
    assert seconds < AT_ONCE_S


def agree_on_both(hosts: Hosts) -> tuple[dict[int, object], float]:
    """Agree on the newest step that both hosts have; return each host's answer, and seconds."""

    def choose(run: RunPaths, node: int) -> object:
        make = partial(make_table, nodes=2, checkpoint=name_of(1))
        table = make(node=node, run_directory=str(run.directory))
        return agree(SalvagePlace.of(table), [6 + node, 7 + node], abandoned=lambda: None).step

    return on_both(hosts, choose)


def test_two_hosts_agree_on_a_snapshot_at_once(hosts: Hosts) -> None:
    results, seconds = agree_on_both(hosts)
    assert results == {0: 7, 1: 7}
    assert seconds < AT_ONCE_S


def test_preflight_finds_a_root_without_hard_links(hosts: Hosts, tmp_path: Path) -> None:
    from tests.support.histories import spec_of

    assert filesystem_of(hosts.first).may_be_shared
    spec = spec_of(launch={"working_directory": str(tmp_path)})
    set_fault(hosts.control, error="ENOLINK")
    with pytest.raises(PreflightError, match="the file system has no hard links"):
        preflight.check(spec, hosts.first / "root")


def test_locks_that_hold_on_one_host_only_are_found_between_two(tmp_path: Path) -> None:
    source, first, second = (tmp_path / name for name in ("server", "first", "second"))
    for folder in (source, first, second):
        folder.mkdir()
    control = tmp_path / "fault"
    with (
        mounted(source, control, first, CACHE_S, locks="local"),
        mounted(source, control, second, CACHE_S, locks="local"),
    ):
        assert check_folder(first) == []
        shared = SharedProbe(first)
        (problem,) = check_folder(second, shared.folder.name, shared.token)
        shared.close()
    assert problem.lacks == "locks between hosts"
    assert problem.text.startswith(f"{second} (fuse.caching_fs): a file that node 0 has locked")


def test_two_hosts_that_see_each_other_have_no_problems(hosts: Hosts) -> None:
    shared = SharedProbe(hosts.first)
    assert check_folder(hosts.second, shared.folder.name, shared.token) == []
    shared.close()
    assert os.listdir(hosts.first) == []
