"""Stop agreement and rank status: ranks at any pace stop after the same step, or train on."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node import agreement
from holdfast.contracts.node.agreement import (
    NodePort,
    StatusPort,
    agree_on_step,
    answer_from_status_table,
    consider,
)
from holdfast.contracts.node.channel import ChannelHost, ChannelMember
from holdfast.contracts.node.rank_status import (
    AT_START,
    NOWHERE,
    Phase,
    Proposal,
    RankRecord,
    RankStatusTable,
)

STEPS = 300
JOIN_S = 30.0


@dataclass
class Collective:
    """A barrier at the end of each step, like the gradient all-reduce."""

    ranks: int
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks)

    def meet(self) -> None:
        self.barrier.wait(JOIN_S)


@dataclass
class Rank:
    """A training loop in a thread, with a step boundary before each step."""

    status_table: RankStatusTable
    record: RankRecord
    number: int
    resumed: int
    pace_s: Callable[[], float]
    collective: Collective
    left_after: int | None = None
    saved_after: list[int] = field(default_factory=list)
    error: Exception | None = None

    def run(self) -> None:
        try:
            self.record.register(self.number, self.resumed)
            time.sleep(self.pace_s())
            for completed in range(self.resumed, STEPS):
                word = Proposal.NONE
                if self.record.finish_step(completed):
                    word = consider(self.status_table, self.record, completed)
                if word is Proposal.GO:
                    self.left_after = completed
                    return
                if word in {Proposal.SAVE, Proposal.TEST}:
                    # A save is a collective: a missing rank would block all others.
                    self.collective.meet()
                    self.saved_after.append(completed)
                time.sleep(self.pace_s())
                self.collective.meet()
            self.left_after = STEPS
        except (AgreementError, threading.BrokenBarrierError) as error:
            self.error = error


def make_ranks(
    status_tables: Sequence[RankStatusTable], seed: int, slowest_s: float, resumed: int = 0
) -> list[Rank]:
    """One rank per record of every status table, each with its own random pace."""
    collective = Collective(sum(status_table.ranks for status_table in status_tables))
    ranks: list[Rank] = []
    for status_table in status_tables:
        for record in status_table.records():
            chance = random.Random(seed * 1000 + len(ranks))
            pace = (lambda c: lambda: c.random() * slowest_s)(chance)
            ranks.append(Rank(status_table, record, len(ranks), resumed, pace, collective))
    return ranks


def run_until_stopped(
    ranks: Sequence[Rank], ports: Sequence[NodePort], wait_s: float
) -> tuple[int, int]:
    """Start the ranks and stop them after `wait_s`; return (step, rounds) when all have left."""
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    time.sleep(wait_s)
    agreed = agree_on_step(ports)
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a rank never left"
    return agreed


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    ranks=st.integers(1, 5),
    slowest_ms=st.sampled_from([0.0, 0.2, 3.0, 20.0]),
    wait_ms=st.integers(0, 40),
)
def test_all_ranks_leave_after_the_same_step_at_any_pace(
    seed: int, ranks: int, slowest_ms: float, wait_ms: int
) -> None:
    status_table, handle = RankStatusTable.create(ranks)
    os.close(handle)
    crew = make_ranks([status_table], seed, slowest_ms / 1000)
    step, _ = run_until_stopped(crew, [StatusPort(status_table)], wait_ms / 1000)
    assert [rank.error for rank in crew] == [None] * ranks
    left = {rank.left_after for rank in crew}
    assert left in ({0 if step == AT_START else step}, {STEPS})
    status_table.close()


@pytest.mark.parametrize("word", [Proposal.SAVE, Proposal.TEST])
@pytest.mark.parametrize(("seed", "slowest_s"), [(1, 0.0), (2, 0.002), (3, 0.01)])
def test_all_ranks_save_or_test_after_the_same_step_and_later_stop_together(
    seed: int, slowest_s: float, word: Proposal
) -> None:
    status_table, handle = RankStatusTable.create(3)
    os.close(handle)
    crew = make_ranks([status_table], seed, slowest_s)
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in crew]
    for thread in threads:
        thread.start()
    wait_until(lambda: status_table.oldest_entered > NOWHERE)
    step, _ = agree_on_step([StatusPort(status_table)], word=word)
    wait_until(lambda: status_table.oldest_entered > step or not any(t.is_alive() for t in threads))
    stop, _ = agree_on_step([StatusPort(status_table)], first_serial=100)
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a rank never left"
    assert [rank.error for rank in crew] == [None] * 3
    expected = [[step]] * 3 if step < STEPS else [[]] * 3
    assert [rank.saved_after for rank in crew] == expected
    assert {rank.left_after for rank in crew} in ({stop}, {STEPS})
    status_table.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + JOIN_S
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.0005)


class MemberNode:
    """Another node in a thread: it answers node 0 from its status table, over loopback."""

    def __init__(self, path: Path, status_table: RankStatusTable, node: int) -> None:
        self._member = ChannelMember(path, {"node": node, "host": "loopback"})
        self._status_table = status_table
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join(JOIN_S)
        self._member.close()

    def _serve(self) -> None:
        while not self._ends.is_set():
            try:
                question = self._member.receive(0.1)
            except ConnectionError:
                return
            if question is not None:
                self._member.reply(**(answer_from_status_table(self._status_table, question) or {}))


@pytest.mark.parametrize(("seed", "slowest_s"), [(1, 0.0), (2, 0.004), (3, 0.02)])
def test_two_nodes_agree_over_the_channel(seed: int, slowest_s: float, tmp_path: Path) -> None:
    status_tables = []
    for _ in range(2):
        status_table, handle = RankStatusTable.create(2)
        os.close(handle)
        status_tables.append(status_table)
    host = ChannelHost(tmp_path / "channel.json", nodes=2)
    member = MemberNode(tmp_path / "channel.json", status_tables[1], node=1)
    try:
        host.wait_for_peers(10)
        crew = make_ranks(status_tables, seed, slowest_s, resumed=7)
        step, _ = run_until_stopped(
            crew, [StatusPort(status_tables[0]), host.peers[1]], wait_s=0.03
        )
    finally:
        member.close()
        host.close()
    assert [rank.error for rank in crew] == [None] * 4
    left = {rank.left_after for rank in crew}
    assert left in ({7 if step == AT_START else step}, {STEPS})


def test_a_stop_before_the_first_step_leaves_at_the_resumed_step() -> None:
    status_table, handle = RankStatusTable.create(2)
    os.close(handle)
    crew = make_ranks([status_table], seed=5, slowest_s=0.05, resumed=40)
    step, rounds = agree_on_step([StatusPort(status_table)])
    assert (step, rounds) == (AT_START, 1)
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in crew]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert [rank.left_after for rank in crew] == [40, 40]


def test_a_rank_past_the_proposed_step_refuses_and_releases_waiting_ranks() -> None:
    status_table, handle = RankStatusTable.create(2)
    os.close(handle)
    waiting, ahead = status_table.records()
    waiting.register(0, 0)
    ahead.register(1, 0)
    ahead.finish_step(9)
    status_table.propose(1, 5)
    answers: list[Proposal] = []
    waiting.finish_step(5)
    thread = threading.Thread(target=lambda: answers.append(consider(status_table, waiting, 5)))
    thread.start()
    assert status_table.accepts(1, 5) is False
    status_table.answer(1, Proposal.ABORT)
    thread.join(JOIN_S)
    assert answers == [Proposal.NONE]
    assert (waiting.entering, waiting.waiting) == (6, 0)


def test_a_vote_of_an_aborted_agreement_does_not_count_in_the_next() -> None:
    status_table, handle = RankStatusTable.create(1)
    os.close(handle)
    (record,) = status_table.records()
    record.register(0, 0)
    status_table.propose(1, 3)
    record.finish_step(3)
    record.wait_at(3, 1)
    status_table.answer(1, Proposal.ABORT)
    assert consider(status_table, record, 3) is Proposal.NONE
    record.finish_step(8)
    status_table.propose(1, 4)
    assert status_table.accepts(1, 4) is False


def test_a_rank_stops_waiting_when_the_stop_coordinator_vanishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "ANSWER_TIMEOUT_S", 0.05)
    status_table, handle = RankStatusTable.create(1)
    os.close(handle)
    (record,) = status_table.records()
    record.register(0, 0)
    status_table.propose(1, 2)
    assert record.finish_step(2) is True
    with pytest.raises(AgreementError, match="no answer to stop proposal 1 within 0 s"):
        consider(status_table, record, 2)


class RefusingPort:
    """A node that refuses every proposal, or is lost; it records the answers that it gets."""

    def __init__(self, *, is_lost: bool = False) -> None:
        self.is_lost = is_lost
        self.answers: list[Proposal] = []
        self.steps: list[int] = []

    def newest_entered(self) -> int:
        return 10 + len(self.steps)

    def propose(self, serial: int, step: int) -> bool:
        if self.is_lost:
            raise ConnectionError("node 1 is lost")
        self.steps.append(step)
        return False

    def answer(self, serial: int, state: Proposal) -> None:
        self.answers.append(state)


def test_agreement_gives_up_after_the_maximum_rounds_and_aborts_each() -> None:
    port = RefusingPort()
    with pytest.raises(AgreementError, match="no common step"):
        agree_on_step([port])
    assert port.answers == [Proposal.ABORT] * agreement.ROUNDS_MAX
    assert port.steps == sorted(port.steps)


class DistantPort:
    """A node whose ranks run `pace` steps while a request is in transit."""

    def __init__(self, pace: int) -> None:
        self.pace = pace
        self.entered = 0

    def newest_entered(self) -> int:
        self.entered += self.pace
        return self.entered

    def propose(self, serial: int, step: int) -> bool:
        self.entered += self.pace
        return self.entered <= step

    def answer(self, serial: int, state: Proposal) -> None:
        self.entered += 0 if state is Proposal.GO else self.pace


@pytest.mark.parametrize("pace", [1, 7, 400])
def test_agreement_is_reached_when_steps_are_shorter_than_the_latency(pace: int) -> None:
    port = DistantPort(pace)
    step, rounds = agree_on_step([port])
    assert rounds <= 3
    assert port.entered <= step <= port.entered + 3 * pace + max(agreement.MARGINS)


def test_a_node_lost_during_agreement_releases_the_other_nodes_ranks() -> None:
    status_table, handle = RankStatusTable.create(1)
    os.close(handle)
    (record,) = status_table.records()
    record.register(0, 0)
    record.finish_step(4)
    with pytest.raises(ConnectionError):
        agree_on_step([StatusPort(status_table), RefusingPort(is_lost=True)])
    assert status_table.proposal[0] is Proposal.ABORT


def test_another_process_sees_the_same_rank_status() -> None:
    status_table, handle = RankStatusTable.create(3)
    path = f"/proc/{os.getpid()}/fd/{handle}"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            other = RankStatusTable.open(path)
            record = other.record(2)
            record.register(2, 11)
            record.finish_step(12, Phase.EVAL)
            record.catch(15)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    record = status_table.record(2)
    assert (record.pid, record.rank, record.resumed_step) == (child, 2, 11)
    assert (record.completed, record.entering, record.phase) == (12, 13, Phase.EVAL)
    assert (status_table.newest_entered, status_table.signals) == (13, 15)
    assert 0 <= record.step_time_s < JOIN_S
    assert status_table.record(0).entering == NOWHERE
    status_table.reset()
    assert (status_table.newest_entered, status_table.signals, record.pid) == (NOWHERE, 0, 0)
    status_table.close()
    os.close(handle)


def test_a_file_that_is_not_a_rank_status_table_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(8192))
    with pytest.raises(ValueError, match="not a rank status table of this version"):
        RankStatusTable.open(str(other))
    with pytest.raises(ValueError, match="0 ranks on one node"):
        RankStatusTable.create(0)
    status_table, handle = RankStatusTable.create(1)
    os.close(handle)
    with pytest.raises(ValueError, match="expected 0 to 0"):
        status_table.record(1)


def test_announce_stop_sets_stop_and_deadline() -> None:
    status_table, handle = RankStatusTable.create(1)
    os.close(handle)
    assert (status_table.stopping, status_table.deadline) == (False, None)
    status_table.announce_stop(1234.5)
    assert (status_table.stopping, status_table.deadline) == (True, 1234.5)
    status_table.announce_stop(None)
    assert (status_table.stopping, status_table.deadline) == (True, None)


def test_a_step_boundary_takes_microseconds() -> None:
    """Two stores and one load, no collective, no lock: microseconds even on a busy machine."""
    status_table, handle = RankStatusTable.create(1)
    os.close(handle)
    (record,) = status_table.records()
    record.register(0, 0)
    count = 20_000
    best = sys.float_info.max
    for _ in range(5):
        begun = time.perf_counter()
        for step in range(count):
            record.finish_step(step)
        best = min(best, (time.perf_counter() - begun) / count)
    assert best < 20e-6, f"{best * 1e6:.1f} µs per step boundary"
