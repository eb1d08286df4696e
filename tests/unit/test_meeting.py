"""Ranks of a node agree on the largest numbers in shared memory, at any pace, or raise an
error."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.forked_ranks import run_ranks

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.rank_status import SAID_MAX, RankStatusTable
from holdfast.trainer.meeting import NodeMeeting

MEETINGS = 300


def test_every_rank_gets_the_largest_numbers_at_any_pace(tmp_path: Path) -> None:
    status_table, handle = RankStatusTable.create(3)

    def act() -> None:
        rank = int(os.environ["RANK"])
        status_table.record(rank).register(rank, 0)
        meeting, pace = NodeMeeting(status_table, rank), random.Random(rank)
        for number in range(MEETINGS):
            if pace.random() < 0.05:
                time.sleep(pace.random() * 0.01)
            values = [number * 10 + rank, -rank, 1_000_000_000 if rank == number % 3 else 0]
            assert meeting.largest(values) == [number * 10 + 2, 0, 1_000_000_000]
            assert meeting.largest([rank]) == [2]
        meeting.close()

    run_ranks(3, tmp_path / "store", act)
    status_table.close()
    os.close(handle)


def test_a_meeting_with_an_ended_rank_raises_and_names_the_rank() -> None:
    status_table, handle = RankStatusTable.create(2)
    child = os.fork()
    if child == 0:
        status_table.record(1).register(1, 0)
        NodeMeeting(status_table, 1)
        os._exit(0)
    status_table.record(0).register(0, 0)
    while status_table.record(1).pid == 0:
        time.sleep(0.001)
    meeting = NodeMeeting(status_table, 0)
    # The child stays unreaped while the parent waits for it.
    with pytest.raises(HoldfastError, match="rank 1 has ended"):
        meeting.largest([1])
    os.waitpid(child, 0)
    meeting.close()
    status_table.close()
    os.close(handle)


def test_values_of_a_rank_count_after_it_ended() -> None:
    status_table, handle = RankStatusTable.create(2)
    child = os.fork()
    if child == 0:
        status_table.record(1).register(1, 0)
        status_table.record(1).say(1, [7])
        os._exit(0)
    os.waitpid(child, 0)
    meeting = NodeMeeting(status_table, 0)
    assert meeting.largest([3]) == [7]
    meeting.close()
    status_table.close()
    os.close(handle)


def test_more_values_than_a_record_holds_are_refused() -> None:
    status_table, handle = RankStatusTable.create(1)
    with pytest.raises(ValueError, match="expected at most 16"):
        status_table.record(0).say(1, [0] * (SAID_MAX + 1))
    status_table.close()
    os.close(handle)
