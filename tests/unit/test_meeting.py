"""Ranks of a node agree on the largest numbers in shared memory, at any pace, or raise an
error."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.support.forked_ranks import run_ranks

from holdfast.contracts.errors import HoldfastError, SessionError
from holdfast.contracts.node.rank_status import SAID_MAX, RankStatusTable
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.meeting import Boundary, NodeMeeting

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


@pytest.mark.more
@pytest.mark.parametrize("is_end", [False, True])
def test_a_rank_that_has_gone_on_from_the_place_of_a_meeting_is_named(is_end: bool) -> None:
    status_table, handle = RankStatusTable.create(3)
    for rank, record in enumerate(status_table.records()):
        record.register(rank, 4)
    # Rank 1 has come as well. Rank 2 has left the place, without its numbers.
    status_table.record(1).say(1, [3, 3])
    absent = status_table.record(2)
    absent.finish_step(5)
    meeting, where = NodeMeeting(status_table, 0), "step 5: "
    if is_end:
        for rank in (0, 1):
            status_table.record(rank).finish_step(5)
        absent.finish_end(5)
        where = "the end of the epoch after step 5: "
    with pytest.raises(SessionError, match=f"{where}ranks 0, 1 came .*, and rank 2 went on"):
        meeting.largest([1, 2], Boundary(5, is_end=is_end))
    meeting.close()
    status_table.close()
    os.close(handle)


def test_a_rank_that_has_the_answer_may_go_on_from_the_place_of_a_meeting() -> None:
    status_table, handle = RankStatusTable.create(2)
    for rank, record in enumerate(status_table.records()):
        record.register(rank, 4)
    status_table.record(1).say(1, [7])
    status_table.record(1).finish_step(5)
    meeting = NodeMeeting(status_table, 0)
    assert meeting.largest([3], Boundary(5)) == [7]
    meeting.close()
    status_table.close()
    os.close(handle)


def test_ranks_of_several_nodes_hear_of_a_rank_of_their_node_that_has_gone_on() -> None:
    status_table, handle = RankStatusTable.create(2)
    for rank, record in enumerate(status_table.records()):
        record.register(rank, 4)
    status_table.record(1).finish_step(5)
    ranks = ControlGroup()
    ranks.meet_on(status_table, 0)
    ranks._require_presence(Boundary(5), waited_s=1.0)
    with pytest.raises(SessionError, match="rank 0 came to save a checkpoint, and rank 1 went on"):
        ranks._require_presence(Boundary(5), waited_s=31.0)
    ranks.close()
    status_table.close()
    os.close(handle)
