"""Which snapshot is salvaged after a crash, and which slot a rank fills next."""

from __future__ import annotations

import os

import pytest

from holdfast.trainer.flusher.plan import SlotView
from holdfast.trainer.flusher.salvage import find_salvage, newest_common
from holdfast.trainer.slots.slots import Slot, SlotState, choose_slot

SNAPSHOT, SEALED, DONE, COPYING = (
    SlotState.SNAPSHOT,
    SlotState.SEALED,
    SlotState.DONE,
    SlotState.COPYING,
)


def view(local_rank: int, step: int, state: SlotState = SNAPSHOT, *, launch: int = 1) -> SlotView:
    return SlotView(
        key=(launch, local_rank, step % 2),
        state=state,
        step=step,
        local_rank=local_rank,
        local_ranks=2,
        checkpoint=f"step-{step:08d}.a0001.l{launch:02d}",
    )


@pytest.mark.parametrize(
    ("views", "committed", "expected"),
    [
        ([], -1, []),
        ([view(0, 7)], -1, []),
        ([view(0, 7), view(1, 7)], -1, [7]),
        ([view(0, 7), view(1, 7), view(0, 8), view(1, 8)], -1, [8, 7]),
        ([view(0, 7), view(1, 7), view(0, 8), view(1, 8)], 7, [8]),
        ([view(0, 7), view(1, 7)], 7, []),
        ([view(0, 7), view(1, 7), view(0, 8), view(1, 8, COPYING)], -1, [7]),
        ([view(0, 8), view(1, 7), view(1, 6)], -1, []),
        ([view(0, 7), view(1, 7, DONE)], -1, []),
        ([view(0, 7, launch=2), view(1, 7)], -1, []),
    ],
)
def test_complete_snapshots_newer_than_the_last_commit_are_salvaged(
    views: list[SlotView], committed: int, expected: list[int]
) -> None:
    found = find_salvage(views, 1, committed)
    assert [group.step for group in found.groups] == expected
    mine = {v.key for v in views if v.launch == 1 and v.state is SNAPSHOT}
    assert set(found.slots) == mine


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ([], None),
        ([[]], None),
        ([[7, 8]], 8),
        ([[7, 8], [6, 7]], 7),
        ([[8], [7]], None),
        ([[7, 8], [7, 8], [8, 9]], 8),
        ([[7], []], None),
    ],
)
def test_nodes_commit_the_newest_step_that_all_list(
    lists: list[list[int]], expected: int | None
) -> None:
    assert newest_common(lists) == expected


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([(SlotState.EMPTY, 0), (SlotState.EMPTY, 0)], 0),
        ([(SNAPSHOT, 6), (SNAPSHOT, 5)], 1),
        ([(SNAPSHOT, 5), (DONE, 9)], 1),
        ([(SlotState.FLUSHING, 5), (SNAPSHOT, 6)], 1),
        ([(SEALED, 5), (SlotState.FLUSHING, 4)], None),
        ([(SlotState.FAILED, 5), (DONE, 4)], 1),
    ],
)
def test_a_free_slot_is_chosen_before_the_one_with_the_older_snapshot(
    slots: list[tuple[SlotState, int]], expected: int | None
) -> None:
    made = []
    for state, step in slots:
        handle = Slot.create(4096)
        slot = Slot(handle)
        os.close(handle)
        slot.begin(step)
        slot.state = state
        made.append(slot)
    assert choose_slot(made) == expected
    for slot in made:
        slot.close()
