"""The tree of sockets between ranks: values, damage to it, and how many descriptors it needs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.rank_tree import Folder

from holdfast.contracts.errors import HoldfastError
from holdfast.trainer.ranks import rank_tree
from holdfast.trainer.ranks.rank_tree import FAN_OUT, RankTree

WAIT_S = 60.0


@contextlib.contextmanager
def ranks(directory: Path, size: int, act: Callable[[RankTree], None]) -> Iterator[list[int]]:
    """Run `act` on forked ranks that are connected. At the end all must have succeeded.

    The block gets their process ids. A rank that it has killed does not count.
    """
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        status = 1
        try:
            act(RankTree.over_store(Folder(directory), rank, size))
            status = 0
        except BaseException:
            # The child ends here in any case. Its status is checked.
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    try:
        yield pids
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        pids.clear()
        assert {code for code in ended if code != -signal.SIGKILL} == {0}, ended
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.more
@pytest.mark.parametrize("size", [1, 2, FAN_OUT + 1, 40])
def test_values_reach_the_ranks_they_are_for(tmp_path: Path, size: int) -> None:
    def act(tree: RankTree) -> None:
        rank, everyone = tree.index, list(range(size))
        own = object()
        for number in range(3):
            texts = [f"{number} from {other}" for other in everyone]
            assert tree.gather_all(texts[rank]) == texts
            assert tree.gather(texts[rank]) == ([] if rank else texts)
            assert tree.scatter(texts if rank == 0 else []) == texts[rank]
            assert tree.broadcast((number, b"x" * (3 << 20)) if rank == 0 else None)[0] == number
            assert tree.largest([rank, -rank, number]) == [size - 1, 0, number]
        assert tree.gather_all([rank] * 100_000)[size - 1][0] == size - 1
        if size == 1:
            assert tree.gather_all(own) == [own], "a value that stays here is not copied"
        tree.close()

    with ranks(tmp_path, size, act):
        pass


def test_parts_of_a_tree_are_trees_and_descriptors_are_bounded(tmp_path: Path) -> None:
    size = 3 * FAN_OUT
    before = descriptors()

    def act(tree: RankTree) -> None:
        rank = tree.index
        assert descriptors() <= before + FAN_OUT + 1
        by_node = tree.split(rank // 5)
        firsts = tree.split("first" if rank % 5 == 0 else None)
        assert by_node is not None
        assert by_node.gather_all(rank) == list(range(rank // 5 * 5, min(size, rank // 5 * 5 + 5)))
        assert (firsts is None) is (rank % 5 > 0)
        if firsts is not None:
            assert firsts.gather_all(rank) == list(range(0, size, 5))
            firsts.close()
        assert descriptors() <= before + 2 * (FAN_OUT + 1)
        by_node.close()
        assert tree.gather_all(rank) == list(range(size))
        tree.close()
        assert descriptors() == before

    with ranks(tmp_path, size, act):
        pass


@pytest.mark.parametrize(
    "lost", [*(pytest.param(rank, marks=pytest.mark.more) for rank in (0, 3)), FAN_OUT + 4]
)
def test_rank_that_dies_ends_the_wait_of_all_and_is_named(tmp_path: Path, lost: int) -> None:
    def act(tree: RankTree) -> None:
        tree.gather_all(None)
        (tmp_path / f"met {tree.index}").touch()
        if tree.index == lost:
            time.sleep(WAIT_S)
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(HoldfastError, match=f"rank {lost} has ended while others waited"):
                tree.gather_all("never")
        assert time.monotonic() - began < WAIT_S / 2

    size = 2 * FAN_OUT
    with ranks(tmp_path, size, act) as pids:
        while len(list(tmp_path.glob("met *"))) < size:
            time.sleep(0.01)
        os.kill(pids[lost], signal.SIGKILL)


def test_rank_that_left_or_is_late_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_tree, "TIMEOUT_S", 1.0)

    def act(tree: RankTree) -> None:
        if tree.index == 2:
            time.sleep(1.7)
        with pytest.raises(HoldfastError, match=r"rank 2 did not come within 1 s"):
            tree.gather_all(0)

    with ranks(tmp_path, 3, act):
        pass

    def leave(tree: RankTree) -> None:
        if tree.index == 1:
            tree.close()
            return
        with pytest.raises(HoldfastError, match=r"rank 1 has left"):
            tree.gather_all(0)

    other = tmp_path / "other"
    other.mkdir()
    with ranks(other, 3, leave):
        pass


def test_child_process_of_a_rank_does_not_keep_its_connections(tmp_path: Path) -> None:
    def act(tree: RankTree) -> None:
        tree.gather_all(None)
        if tree.index == 1:
            if os.fork() == 0:
                time.sleep(WAIT_S / 4)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(HoldfastError, match="rank 1 has ended"):
            tree.gather_all(0)
        assert time.monotonic() - began < WAIT_S / 6

    with ranks(tmp_path, 3, act):
        pass


@pytest.mark.more
def test_stranger_cannot_join(tmp_path: Path) -> None:
    """A connection without the token, a silent one and one that talks nonsense change nothing."""

    def act(tree: RankTree) -> None:
        assert tree.gather_all(tree.index) == [0, 1]
        tree.close()

    with Intruder(tmp_path) as intruder, ranks(tmp_path, 2, act):
        intruder.wait()


class Intruder:
    """Connects to rank 0 before any rank does. It holds back rank 0's address meanwhile."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._sockets = directory, list[socket.socket]()
        self._plain = Folder.get

    def __enter__(self) -> Intruder:
        waits, plain = self._directory / "intruded", self._plain

        def get(self: Folder, key: str) -> bytes:
            while key == "address 0" and not waits.exists():
                time.sleep(0.005)
            return plain(self, key)

        Folder.get = get  # type: ignore[method-assign]
        return self

    def wait(self) -> None:
        _, port = json.loads(self._plain(Folder(self._directory), "address 0"))
        hello = b'{"nonce": "00", "from": 1, "tree": "all", "to": 0}\n'
        for content in (b"", b"nonsense\n", hello):
            connected = socket.create_connection(("127.0.0.1", port))
            self._sockets.append(connected)
            connected.sendall(content)
        (self._directory / "intruded").touch()
        poll = select.poll()
        poll.register(self._sockets[1], select.POLLIN)
        assert poll.poll(WAIT_S * 1000), "rank 0 must close the connection"

    def __exit__(self, *_: object) -> None:
        Folder.get = self._plain  # type: ignore[method-assign]
        for connected in self._sockets:
            connected.close()
