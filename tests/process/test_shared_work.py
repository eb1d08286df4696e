"""Ranks that share the verification and the fetch before a resume."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.test_rank_tree import ranks as connected
from tests.support.forked_ranks import run_ranks
from tests.support.mirrors import make_checkpoint

from holdfast.contracts.disk.damage import find_damage, find_problems
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import DamagedCheckpointError, HoldfastError, MirrorError
from holdfast.trainer.loading.restore import Meter, Preparation, SharedWork
from holdfast.trainer.mirror.transfer import (
    Retries,
    commit,
    open_store,
    read_remote,
    read_upload,
    send_files,
)
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.ranks.rank_tree import RankTree

RANKS = 3
SIZES = {"a": 3 << 20, "pp0/b": 9 << 20, "empty": 0, "c": 5 << 20}


def run_parts(
    place: Path,
    part: Callable[..., Any],
    decide: Callable[[SharedWork], Any],
    expect: Callable[[Callable[[], Any]], None],
    **options: Any,
) -> None:
    """Lead `decide` on forked ranks, and let each rank pass the call to `expect`."""

    def act() -> None:
        ranks = ControlGroup()
        work = SharedWork(ranks, {"part": part}, **options)
        expect(lambda: work.lead(lambda: decide(work)))
        ranks.close()

    run_ranks(RANKS, place / "store", act)


def own_rank() -> int:
    return int(os.environ["RANK"])


def test_every_rank_does_a_part_and_gets_the_decision(tmp_path: Path) -> None:
    def part(meter: Meter, base: int) -> int:
        time.sleep(0.05 * own_rank())
        meter.add(1)
        return base + own_rank()

    def decide(work: SharedWork) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        return [*work.divide("part", 10), *work.divide("part", 20)]

    def expect(lead: Callable[[], Any]) -> None:
        assert lead() == [10, 11, 12, 20, 21, 22]

    run_parts(tmp_path, part, decide, expect)


def test_error_of_a_part_reaches_the_decision_and_error_of_the_decision_all_ranks(
    tmp_path: Path,
) -> None:
    def part(_: Meter, kind: str) -> None:
        if own_rank() == 1:
            raise MirrorError("it does not answer", is_passing=True)
        if own_rank() == 2 and kind == "damage":
            raise DamagedCheckpointError("x", damaged=["c: missing"])

    def decide(work: SharedWork) -> None:
        with pytest.raises(DamagedCheckpointError) as damaged:
            work.divide("part", "damage")
        assert damaged.value.damaged == ("c: missing",), "damage comes before other errors"
        with pytest.raises(MirrorError, match=r"rank 1: .*does not answer") as refused:
            work.divide("part", "")
        assert refused.value.is_passing
        raise MirrorError("nothing is left")

    def expect(lead: Callable[[], Any]) -> None:
        with pytest.raises(HoldfastError, match="nothing is left"):
            lead()

    run_parts(tmp_path, part, decide, expect)


@pytest.mark.more
def test_wait_ends_only_when_nothing_moves_any_more(tmp_path: Path) -> None:
    def part(meter: Meter, kind: str) -> None:
        for _ in range(15 if own_rank() == 1 else 0):
            time.sleep(0.1)
            meter.add(1)
        if kind == "hang" and own_rank() == 2:
            time.sleep(30)

    def decide(work: SharedWork) -> str:
        work.divide("part", "slow")
        work.divide("part", "hang")
        return "not reached"

    def expect(lead: Callable[[], Any]) -> None:
        began = time.monotonic()
        with pytest.raises(HoldfastError, match="have read nothing for 1 s: 2; expected progress"):
            lead()
        # Two parts move for 1.5 s each, which is longer than the limit.
        assert 4.0 <= time.monotonic() - began < 25

    run_parts(tmp_path, part, decide, expect, stalled_s=1.0)


def test_decision_that_hangs_ends_the_wait_of_all_ranks(tmp_path: Path) -> None:
    def expect(lead: Callable[[], Any]) -> None:
        with pytest.raises(HoldfastError, match="have read nothing for 1 s: 0; expected progress"):
            lead()

    run_parts(tmp_path, lambda _: None, lambda _: time.sleep(30), expect, stalled_s=1.0)


def test_rank_that_dies_ends_the_wait_of_all_ranks_and_is_named(tmp_path: Path) -> None:
    own: list[int] = []

    def part(_: Meter, dying: int) -> None:
        if own == [dying]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    def act(tree: RankTree) -> None:
        own.append(tree.index)
        ranks = ControlGroup()
        ranks.rank, ranks.world_size, ranks.group = tree.index, tree.size, tree
        work, began = SharedWork(ranks, {"part": part}), time.monotonic()
        with pytest.raises(HoldfastError, match="rank 1 has ended while others waited for it"):
            work.lead(lambda: work.divide("part", 1))
        assert time.monotonic() - began < 20

    with connected(tmp_path, RANKS, act):
        pass


def identity_of(rank: int, *, node: int = 0, local_rank: int = 0, local_ranks: int = 1) -> Identity:
    return Identity(
        run_uid="a" * 32,
        run="run",
        attempt=1,
        launch=1,
        rank=rank,
        local_rank=local_rank,
        local_ranks=local_ranks,
        world_size=RANKS,
        node=node,
        nodes=1 + node,
        command_digest="",
    )


def test_shares_of_a_verification_find_what_one_reader_finds(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "run", 1, SIZES)
    manifest = read_manifest(directory)
    assert manifest is not None
    read: list[int] = []
    for share in range(7):
        assert find_problems(directory, manifest, share=(share, 7), progress=read.append) == {}
    assert sum(read) == manifest.bytes, "every byte is in exactly one share"
    for name, at in (("pp0/b", 1), ("pp0/b", 5 << 20), ("pp0/b", 8 << 20), ("c", 0)):
        with open(directory / name, "r+b") as stream:
            stream.seek(at)
            old = stream.read(1)
            stream.seek(at)
            stream.write(bytes([old[0] ^ 1]))
    (directory / "a").unlink()
    alone = find_damage(directory, manifest)
    assert [line.split(":")[0] for line in alone] == ["a", "pp0/b", "c"]
    assert alone[1].endswith(", and 2 more blocks")

    def act() -> None:
        ranks = ControlGroup()
        prepared = Preparation(identity_of(ranks.rank), ranks, Tiers())
        assert prepared.lead(lambda: prepared.verify(directory, manifest)) == alone
        ranks.close()

    run_ranks(RANKS, tmp_path / "store", act)


@pytest.mark.parametrize("is_local", [False, True])
def test_files_of_the_mirror_are_fetched_by_all_ranks(tmp_path: Path, is_local: bool) -> None:
    url, retries = f"file://{tmp_path}/mirror", Retries(pauses_s=())
    store = open_store(url)
    upload = read_upload(make_checkpoint(tmp_path / "run", 1, SIZES), None)
    assert upload is not None
    send_files(store, upload, retries=retries)
    commit(store, upload, retries=retries)
    name = CheckpointName.parse(upload.name)
    assert name is not None
    into = tmp_path / "into" / upload.name

    def act() -> None:
        ranks = ControlGroup()
        node, local = (0, ranks.rank) if ranks.rank < 2 else (1, 0)
        who = identity_of(ranks.rank, node=node, local_rank=local, local_ranks=2 - node)
        tiers = Tiers(local=str(tmp_path / f"disk{node}") if is_local else "")
        prepared = Preparation(who, ranks, tiers)

        def decide() -> int:
            remote = read_remote(store, name, None, retries=retries)
            assert remote is not None
            return prepared.fetch(remote, into, url)

        assert prepared.lead(decide) == sum(SIZES.values()), "node 0 reads each file once"
        folder = tiers.node_folder(who.run, who.run_uid)
        place = into if folder is None else folder.checkpoint(upload.name)
        assert find_damage(place, upload.manifest) == []
        assert read_manifest(place) == upload.manifest
        assert sorted(file.name for file in place.iterdir() if file.is_file()) == sorted(
            ["a", "c", "empty", "manifest.json", "mirrored.json"]
        )
        ranks.close()

    run_ranks(RANKS, tmp_path / "store", act)
    assert into.exists() is not is_local
