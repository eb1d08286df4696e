"""Mirror copies by real flushers and agents: killed flushers, two nodes, the end of a job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun
from tests.support.flusher_supervisor import FakeRank, SlotHolder, wait_for, wait_until
from tests.support.object_store import ACCESS_KEY, BUCKET, ObjectStore, Proxy, ProxyFault

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.mirrors import Tiers, checkpoint_folder, read_record
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events
from holdfast.contracts.states import AttemptState
from holdfast.trainer.mirror import __main__ as mirror
from holdfast.trainer.mirror.store import PART_BYTES
from holdfast.trainer.mirror.transfer import open_store
from holdfast.trainer.slots.slots import SlotState
from holdfast.workers.checkpoints import deletion, retention
from holdfast.workers.checkpoints.deletion import location_of

UID = "0" * 32
NAME = "step-00000007.a0001.l01"
WAIT_S = 120.0


def socket_name(node: int = 0) -> str:
    return f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}-{node}"


def told(run: Path, kind: EventKind) -> list[str]:
    return [str(e.data["checkpoint"]) for e in load_events(RunPaths(run)) if e.kind is kind]


@pytest.mark.more
def test_replacement_of_a_killed_flusher_finishes_the_mirror_copy(
    s3: ObjectStore, proxy: Proxy, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    tiers = Tiers(mirror=f"s3://{BUCKET}/{tmp_path.name}")
    environment = {**s3.environment(proxy.port), **tiers.to_environment()}
    flusher_supervisor = SlotHolder(socket_name(), environment=environment, run=run)
    # The first requests are the tombstone, the list, the file and its size; killed at the fourth.
    strike = ProxyFault(3, True, flusher_supervisor.process.kill)
    proxy.arm(strike)
    try:
        rank = FakeRank(flusher_supervisor, run)
        wait_for(rank.stage(7, b"x" * 50_000), SlotState.DONE)
        assert strike.has_fired.wait(WAIT_S)
        flusher_supervisor.kill()
        proxy.arm(None)
        assert read_record(run / "checkpoints" / NAME) is None
        flusher_supervisor.start()
        answer = flusher_supervisor.drain(WAIT_S, mirror=True)
        assert answer["unmirrored"] == []
        assert told(run, EventKind.MIRRORED) == [NAME]
        assert read_record(run / "checkpoints" / NAME) is not None
        assert mirror.verify(open_store(tiers.location("r", UID)), NAME)["ok"]
        rank.close()
    finally:
        flusher_supervisor.close()


def test_flusher_sends_no_bytes_that_the_mirror_has(
    s3: ObjectStore, proxy: Proxy, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    tiers = Tiers(mirror=f"s3://{BUCKET}/{tmp_path.name}")
    environment = {**s3.environment(proxy.port), **tiers.to_environment()}
    flusher_supervisor = SlotHolder(socket_name(), environment=environment, run=run)
    frozen = os.urandom(2 * PART_BYTES)
    try:
        rank = FakeRank(flusher_supervisor, run, data_bytes=3 * PART_BYTES)
        for step in (7, 8):
            content = frozen + bytes([step]) * 1000
            wait_for(rank.stage(step, content), SlotState.DONE)
            assert flusher_supervisor.drain(WAIT_S, mirror=True)["unmirrored"] == []
        copies = [e.data for e in load_events(RunPaths(run)) if e.kind is EventKind.MIRRORED]
        own = [one["bytes"] - one["sent_bytes"] for one in copies]
        assert own == [0, 2 * PART_BYTES]
        assert mirror.verify(open_store(tiers.location("r", UID)), NAME.replace("7", "8"))["ok"]
        rank.close()
    finally:
        flusher_supervisor.close()


def test_unreachable_mirror_delays_no_save_and_is_reported(tmp_path: Path) -> None:
    run, place = tmp_path / "r", tmp_path / "mirror"
    place.write_text("a file where a directory should be")
    tiers = Tiers(mirror=f"file://{place}")
    flusher_supervisor = SlotHolder(socket_name(), environment=tiers.to_environment(), run=run)
    try:
        rank = FakeRank(flusher_supervisor, run)
        for step in range(1, 10):
            wait_for(rank.stage(step, b"x" * 1000, slot=step % 2), SlotState.DONE)
        answer = flusher_supervisor.drain(1.0, mirror=True)
        assert "step-00000009.a0001.l01" in answer["unmirrored"]
        assert flusher_supervisor.drain(WAIT_S)["unmirrored"] == [], (
            "a drain must not wait for the mirror unless asked"
        )
        wait_until(lambda: told(run, EventKind.MIRROR_FAILED), "what was passed over", WAIT_S)
        assert "step-00000002.a0001.l01" in told(run, EventKind.MIRROR_FAILED)
        rank.close()
    finally:
        flusher_supervisor.close()


def test_two_nodes_mirror_their_own_files_and_one_manifest(tmp_path: Path) -> None:
    run, copies = tmp_path / "r", tmp_path / "mirror" / f"r.{UID}"
    nodes = [
        Tiers(mirror=f"file://{tmp_path}/mirror", local=f"{tmp_path}/node{n}") for n in range(2)
    ]
    folders = [tiers.node_folder("r", UID) for tiers in nodes]
    flusher_supervisors = [
        SlotHolder(socket_name(n), node=n, nodes=2, environment=tiers.to_environment(), run=run)
        for n, tiers in enumerate(nodes)
    ]
    try:
        ranks = []
        for n, folder in enumerate(folders):
            assert folder is not None
            where = str(folder.directory)
            ranks.append(
                FakeRank(
                    flusher_supervisors[n],
                    run,
                    rank=n,
                    world_size=2,
                    node=n,
                    nodes=2,
                    node_folder=where,
                )
            )
        slots = [rank.stage(7, bytes([65 + rank.rank]) * 9000) for rank in ranks]
        for slot in slots:
            wait_for(slot, SlotState.DONE)
        for flusher_supervisor in reversed(flusher_supervisors):
            assert flusher_supervisor.drain(WAIT_S, mirror=True)["unmirrored"] == []
        shared = run / "checkpoints" / NAME
        assert sorted(os.listdir(shared)) == ["manifest.json", "mirrored.json"]
        for n, folder in enumerate(folders):
            assert folder is not None
            assert os.listdir(folder.checkpoint(NAME)) == [f"__{n}_0.distcp"]
        manifest = read_manifest(copies / checkpoint_folder(NAME))
        assert manifest is not None
        assert find_damage(copies / checkpoint_folder(NAME), manifest) == []
        for rank in ranks:
            rank.close()
    finally:
        for flusher_supervisor in flusher_supervisors:
            flusher_supervisor.close()


@pytest.mark.more
def test_job_waits_for_its_mirror_copies_and_prune_deletes_them(
    s3: ObjectStore, proxy: Proxy, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    keep = {"last": 1}
    run = LocalRun(
        tmp_path / "root", steps=12, checkpoint={"interval": 4, "mirror": url, "keep": keep}
    )
    try:
        run.submit()
        assert run.wait_for_end().state is AttemptState.COMPLETED
    finally:
        run.end_all()
    committed = [d.name for d in run.paths.list_checkpoints() if read_record(d)]
    assert committed[-1].startswith("step-00000012"), "the job must wait for the last copy"
    location = location_of(run.paths)
    assert location is not None
    assert mirror.verify(open_store(location), committed[-1])["ok"]
    doomed = [one.name for one in retention.plan_run(run.paths) if not one.is_kept]
    assert doomed
    deletion.apply(run.paths, by="tests")
    for name in doomed:
        assert open_store(location).sizes(checkpoint_folder(name)) == {}
        assert open_store(location).read(f"tombstones/{name}.json") is not None
    assert mirror.verify(open_store(location), committed[-1])["ok"]
    # No file of the run contains the secret.
    files = [p for p in run.paths.directory.rglob("*") if p.is_file()]
    found = [p for p in files if s3.secret.encode() in p.read_bytes()]
    assert found == []
    assert not [p for p in files if p.suffix == ".json" and ACCESS_KEY.encode() in p.read_bytes()]
