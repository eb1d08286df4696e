"""Two hosts on GlusterFS, each with its own client, and why SeaweedFS is refused.

The servers are real, on loopback. `test_served_runs.py` has whole runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

# Appended, so that no module of ours can shadow an installed one.
sys.path.append(str(Path(__file__).parents[2] / "infra" / "filesystems"))

from served_mounts import Served, served
from tests.faults.saves import name_of
from tests.process.local_runs import wait_until
from tests.process.test_caching_mounts import AT_ONCE_S, Hosts, agree_on_both, commit_on_both

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.filesystems import filesystem_of, is_listed, is_there
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events
from holdfast.contracts.records.supervision import is_supervised
from holdfast.workers.nodes.heartbeats import HeartbeatWriter, read_heartbeats
from holdfast.workers.nodes.root_probe import RACES, SharedProbe, check_folder, judge_races, race

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TIMES = 10
HOLDER = (
    "import sys, time; from pathlib import Path\n"
    "from holdfast.flows.supervisor.flow_lock import FlowLock\n"
    "with FlowLock(Path(sys.argv[1])) as lock:\n"
    "    print(lock.try_take(), flush=True)\n"
    "    time.sleep(600)\n"
)


class ServedHosts(Hosts):
    """Two hosts' views of the served file system."""

    shared: Served


def two_hosts(kind: str, folder: Path) -> Iterator[ServedHosts]:
    first, second = folder / "first", folder / "second"
    first.mkdir()
    second.mkdir()
    with (
        served(kind, folder / "served") as shared,
        shared.mounted(first, "first"),
        shared.mounted(second, "second"),
    ):
        hosts = ServedHosts(first, second, folder / "unused")
        object.__setattr__(hosts, "shared", shared)
        yield hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHosts]:
    yield from two_hosts("glusterfs", tmp_path_factory.mktemp("served"))


def runs_of(hosts: Hosts, name: str) -> Hosts:
    """Return a new folder, as both hosts see it."""
    (hosts.first / name).mkdir()
    wait_until(lambda: is_there(hosts.second / name), "the folder")
    return Hosts(hosts.first / name, hosts.second / name, hosts.control)


@pytest.fixture
def runs(hosts: ServedHosts, request: pytest.FixtureRequest) -> Hosts:
    """A folder of the test's own, as both hosts see it."""
    name = request.node.name
    return runs_of(hosts, name)


def test_both_hosts_can_use_it_and_see_each_other(runs: Hosts) -> None:
    assert filesystem_of(runs.first).is_network
    began = time.monotonic()
    shared = SharedProbe(runs.first)
    assert check_folder(runs.first) == []
    assert check_folder(runs.second, shared.folder.name, shared.token) == []
    shared.close()
    print(f"{filesystem_of(runs.first).kind}: tried in {time.monotonic() - began:.2f} s")
    assert os.listdir(runs.first) == []


def race_of(hosts: Hosts) -> list[int]:
    """Return how many hosts got each name of a race, started together as node 0 starts nodes."""
    wait_until(lambda: is_there(hosts.second), "the folder")
    with ThreadPoolExecutor(2) as pool:
        return [
            sum(pool.map(race, [hosts.first, hosts.second], [number] * 2))
            for number in range(RACES)
        ]


def refused(hosts: Hosts) -> int:
    """Return how often the races of a start find that both hosts got a name."""
    return sum(bool(judge_races(race_of(runs_of(hosts, str(one))))) for one in range(TIMES))


def test_of_two_hosts_one_gets_each_name(runs: Hosts) -> None:
    assert refused(runs) == 0


@pytest.mark.parametrize("kind", ["seaweedfs", "seaweedfs-local-locks"])
def test_seaweedfs_gives_two_hosts_the_same_name_and_is_refused(tmp_path: Path, kind: str) -> None:
    for hosts in two_hosts(kind, tmp_path):
        found = refused(hosts)
    print(f"{kind}: refused {found} times of {TIMES}")
    assert found >= TIMES - 1


def shows(run: RunPaths, number: int) -> bool:
    """Return True if the run has `number` + 1 lines, and heartbeats of this number only."""
    beats = {one.monotonic_s for one in read_heartbeats(run.attempt(1))}
    return len(load_events(run)) == number + 1 and beats == {number}


def test_lines_and_heartbeats_of_a_writer_that_goes_on_are_seen(runs: Hosts) -> None:
    here, there = (RunPaths(folder / "run") for folder in (runs.first, runs.second))
    make_directory(here.attempt(1).journal)
    make_directory(here.attempt(1).heartbeats)
    writer = HeartbeatWriter(here.attempt(1))
    beat: dict[str, Any] = {"node": 0, "host": "h", "time": 1.0, "attempt": 1, "launch": 1}
    with JournalWriter(here.attempt(1).node_journal(0)) as journal:
        for number in range(5):
            journal.append(EventKind.NOTE, attempt=1, text=str(number))
            writer.write([{**beat, "agent_pid": 1, "monotonic_s": float(number)}])
            wait_until(partial(shows, there, number), "the line and the heartbeat", AT_ONCE_S)
    writer.close()
    assert [event.data["text"] for event in load_events(there)] == list("01234")


def test_two_hosts_share_a_journal(runs: Hosts) -> None:
    """Operators on two hosts append to the journal `cli` within a moment, many times."""
    for number in range(TIMES):
        here, there = (RunPaths(folder / f"{number}") for folder in (runs.first, runs.second))
        make_directory(here.journal)
        for run, text in ((here, "first"), (there, "second"), (here, "third")):
            with JournalWriter(run.journal_of("cli")) as journal:
                journal.append(EventKind.NOTE, text=text)
        for run in (here, there):
            events = load_events(run)
            assert [event.data["text"] for event in events] == ["first", "second", "third"]
            assert [(event.opening, event.sequence) for event in events] == [(1, 0), (2, 0), (3, 0)]


def test_two_hosts_commit_a_step_together(runs: Hosts) -> None:
    results, seconds = commit_on_both(runs)
    assert len(set(results.values())) == 1
    assert len(results) == 2
    assert seconds < AT_ONCE_S


def test_two_hosts_agree_on_a_snapshot(runs: Hosts) -> None:
    results, seconds = agree_on_both(runs)
    assert results == {0: 7, 1: 7}
    assert seconds < AT_ONCE_S


def test_a_checkpoint_that_one_host_deletes_is_gone_on_the_other(runs: Hosts) -> None:
    folder = RunPaths(runs.first / "run").checkpoint(name_of(1))
    make_directory(folder)
    (folder / "manifest.json").write_text("{}")
    seen = RunPaths(runs.second / "run").checkpoint(name_of(1))
    wait_until(lambda: is_there(seen / "manifest.json"), "the manifest", AT_ONCE_S)
    folder.rename(folder.with_name(f"{folder.name}.removing"))
    wait_until(lambda: not is_listed(seen), "its end", AT_ONCE_S)


def test_the_lock_of_a_supervisor_ends_with_its_host(hosts: ServedHosts, runs: Hosts) -> None:
    lock = runs.second.relative_to(hosts.second) / "flow.lock"
    own_point = hosts.first.parent / "third"
    own_point.mkdir(exist_ok=True)
    holder = subprocess.Popen(
        [
            *hosts.shared.in_own_mount(own_point, "third"),
            *(sys.executable, "-c", HOLDER, str(own_point / lock)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        wait_until(lambda: is_there(runs.second / "flow.lock"), "the lock's file")
        assert is_supervised(runs.second / "flow.lock")
        # The client of that host dies with it, so only the server can release the lock.
        holder.kill()
        began = time.monotonic()
        wait_until(lambda: not is_supervised(runs.second / "flow.lock"), "its end", 120)
        print(f"{filesystem_of(runs.second).kind}: released {time.monotonic() - began:.1f} s later")
    finally:
        holder.kill()
        holder.wait()


def test_locks_that_hold_in_one_mount_only_are_refused(tmp_path: Path) -> None:
    for hosts in two_hosts("seaweedfs-local-locks", tmp_path):
        assert check_folder(hosts.first) == []
        shared = SharedProbe(hosts.first)
        (problem,) = check_folder(hosts.second, shared.folder.name, shared.token)
        shared.close()
    assert problem.lacks == "locks between hosts"
    assert "(fuse.seaweedfs)" in problem.text
