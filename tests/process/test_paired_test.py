"""The paired test measures nodes and links between real ranks, and changes nothing of training."""

from __future__ import annotations

import random
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.forked_ranks import run_ranks

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.node.agreement import StatusPort, agree_on_step
from holdfast.contracts.node.rank_status import Proposal, RankStatusTable
from holdfast.contracts.records.history import load_events
from holdfast.trainer import Session
from holdfast.trainer.process import devices
from holdfast.trainer.ranks import paired_test, rank_tree
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.paired_test import Measured, measure, pairs_of, rounds_of

NODES = 4


@pytest.mark.parametrize(
    ("nodes", "pairs", "rounds"),
    [
        (1, [], []),
        (2, [(0, 1)], [[0]]),
        (3, [(0, 1), (1, 2), (2, 0)], [[0], [1], [2]]),
        (4, [(0, 1), (1, 2), (2, 3), (3, 0)], [[0, 2], [1, 3]]),
        (5, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)], [[0, 2], [1, 3], [4]]),
    ],
)
def test_the_pairs_are_a_ring(
    nodes: int, pairs: list[tuple[int, int]], rounds: list[list[int]]
) -> None:
    assert pairs_of(nodes) == pairs
    assert rounds_of(nodes) == rounds
    for numbers in rounds:
        busy = [node for number in numbers for node in pairs[number]]
        assert len(busy) == len(set(busy))


class SlowSocket(socket.socket):
    """The end of a link of `RATE` bytes per second."""

    RATE = 20e6

    def sendall(self, content: bytes, flags: int = 0) -> None:  # type: ignore[override]
        time.sleep(len(content) / self.RATE)
        super().sendall(content, flags)


def measured(rank: int) -> Measured | None:
    ranks = ControlGroup()
    try:
        return measure(ranks.group, node=rank, nodes=NODES, is_first=True, device=devices.in_use())
    finally:
        dist.barrier()
        ranks.close()


def test_a_slow_link_and_a_busy_processor_are_measured(tmp_path: Path) -> None:
    """Node 2 sends slowly, and node 1 shares its interpreter with another thread."""

    def act() -> None:
        rank = dist.get_rank()
        torch.manual_seed(3)
        before = (torch.get_rng_state(), random.getstate())
        if rank == 2:
            lead, follow = rank_tree.dial, rank_tree.greet
            vars(paired_test)["dial"] = lambda *a: _slow(lead(*a))
            vars(paired_test)["greet"] = lambda *a: (a[3], _slow(follow(*a)[1]))
        if rank == 1:
            threading.Thread(target=_spin, daemon=True).start()
        began = time.monotonic()
        found = measured(rank)
        assert time.monotonic() - began < 2 * (paired_test.LINKS_S + 1.0), "all of this machine"
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        assert (found is not None) is (rank == 0)
        if found is not None:
            (tmp_path / "found").write_text(repr(found.to_json()))

    run_ranks(NODES, tmp_path / "store", act)
    found = eval((tmp_path / "found").read_text())
    rates, hosts = found["pair_rates"], found["host_times"]
    assert [len(values) for values in found.values()] == [NODES] * 3
    # Both links of node 2, and no other.
    assert max(rates[1], rates[2]) < SlowSocket.RATE * 2 / 1e6
    assert min(rates[0], rates[3]) > 2 * max(rates[1], rates[2])
    # Other processes of a busy machine slow the other ranks too, but hardly all of them.
    assert hosts[1] > 1.4 * min(hosts)


def _slow(connected: socket.socket | None) -> socket.socket:
    assert connected is not None
    return SlowSocket(fileno=connected.detach())


def _spin() -> None:
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        pass


def test_a_dead_link_takes_the_time_of_the_test_and_no_more(tmp_path: Path) -> None:
    """Node 3 never answers, so its two pairs have no rate."""

    def act() -> None:
        rank = dist.get_rank()
        if rank == 3:
            paired_test._Links.measure = lambda self: 0.0  # type: ignore[method-assign]
        found = measured(rank)
        if found is not None:
            assert found.pair_rates[2:] == [0.0, 0.0]
            assert min(found.pair_rates[:2]) > 0.0

            (tmp_path / "measured").touch()

    run_ranks(NODES, tmp_path / "store", act)
    assert (tmp_path / "measured").exists()


def test_a_link_that_ends_no_exchange_in_time_is_slow_and_not_missing(tmp_path: Path) -> None:
    """An exchange over the links of node 2 takes longer than the test."""

    def act() -> None:
        if dist.get_rank() == 2:
            SlowSocket.RATE = 1e6
            lead, follow = rank_tree.dial, rank_tree.greet
            vars(paired_test)["dial"] = lambda *a: _slow(lead(*a))
            vars(paired_test)["greet"] = lambda *a: (a[3], _slow(follow(*a)[1]))
        found = measured(dist.get_rank())
        if found is not None:
            (tmp_path / "found").write_text(repr(found.to_json()))

    run_ranks(NODES, tmp_path / "store", act)
    rates = eval((tmp_path / "found").read_text())["pair_rates"]
    assert all(0.0 < rate < 10.0 for rate in rates[1:3]), rates
    assert min(rates[0], rates[3]) > 2 * max(rates[1:3])


STEPS = 200


def train(folder: Path, *, is_tested: bool) -> torch.Tensor:
    """Train, with one test in the middle if `is_tested`, and return the end of the weights."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Session(model, optimizer, directory=folder) as session:
        table = session._context.status_table
        asking = threading.Thread(target=_ask, args=(table,), daemon=True)
        for step in session.steps(STEPS):
            if is_tested and step == 20 and dist.get_rank() == 0:
                asking.start()
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            time.sleep(0.005)
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def _ask(table: RankStatusTable) -> None:
    agree_on_step([StatusPort(table)], first_serial=5000, word=Proposal.TEST)


def test_a_test_between_two_steps_changes_nothing_of_training(tmp_path: Path) -> None:
    def act() -> None:
        plain = train(tmp_path / "plain", is_tested=False)
        tested = train(tmp_path / "tested", is_tested=True)
        assert torch.equal(plain, tested)

    run_ranks(2, tmp_path / "store", act)
    lines = {
        name: [
            event.data
            for event in load_events(RunPaths(tmp_path / name))
            if event.kind is EventKind.SLOWDOWN_TESTED
        ]
        for name in ("plain", "tested")
    }
    assert lines["plain"] == []
    (line,) = lines["tested"]
    assert 20 <= line["step"] < STEPS
    assert line["took_s"] < 10.0
    assert line["host_times"][0] > 0.0
    assert line["device_times"][0] > 0.0
    # Both ranks are on one node, so there is no pair.
    assert line["pair_rates"] == []
