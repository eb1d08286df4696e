"""Which staged steps are written, waited for or given up."""

from __future__ import annotations

import pytest

from holdfast.trainer.flusher.plan import Departures, SlotView, plan
from holdfast.trainer.slots.slots import SlotState

SEALED, COPYING, DONE = SlotState.SEALED, SlotState.COPYING, SlotState.DONE


def view(
    local_rank: int,
    step: int,
    state: SlotState = SEALED,
    *,
    slot: int = 0,
    launch: int = 1,
    is_former: bool = False,
) -> SlotView:
    return SlotView(
        key=(launch, local_rank, slot),
        state=state,
        step=step,
        local_rank=local_rank,
        local_ranks=2,
        checkpoint=f"step-{step:08d}.a0001.l{launch:02d}",
        is_former=is_former,
    )


def outline(views: list[SlotView], departures: Departures) -> tuple[list[int], list[int]]:
    found = plan(views, departures)
    return [g.step for g in found.ready], [g.step for g, _ in found.dead]


@pytest.mark.parametrize(
    ("views", "departures", "expected"),
    [
        ([], Departures(), ([], [])),
        ([view(0, 5)], Departures(), ([], [])),
        ([view(0, 5), view(1, 5)], Departures(), ([5], [])),
        ([view(0, 5), view(1, 5)], Departures(gone={(1, 0), (1, 1)}), ([5], [])),
        ([view(0, 5), view(1, 5, COPYING)], Departures(), ([], [])),
        ([view(0, 5), view(1, 5, COPYING)], Departures(gone={(1, 1)}), ([], [5])),
        ([view(0, 5)], Departures(gone={(1, 0)}), ([], [])),
        ([view(0, 5)], Departures(gone={(2, 1)}), ([], [])),
        ([view(0, 5), view(1, 6, COPYING)], Departures(), ([], [5])),
        ([view(0, 5), view(1, 4, DONE)], Departures(), ([], [])),
        ([view(0, 1, slot=2), view(1, 2, DONE, is_former=True)], Departures(), ([], [])),
        ([view(0, 5, is_former=True), view(1, 6, COPYING)], Departures(), ([], [5])),
        ([view(0, 5)], Departures(newest_launch=2), ([], [5])),
        ([view(0, 5), view(1, 5)], Departures(newest_launch=2), ([5], [])),
        (
            [view(0, 9, slot=1), view(1, 9, slot=1), view(0, 8), view(1, 8)],
            Departures(),
            ([8, 9], []),
        ),
        (
            [view(0, 3, launch=2), view(1, 3, launch=2), view(0, 8), view(1, 8)],
            Departures(newest_launch=2),
            ([8, 3], []),
        ),
    ],
)
def test_staged_steps_are_ready_waiting_or_given_up(
    views: list[SlotView], departures: Departures, expected: tuple[list[int], list[int]]
) -> None:
    assert outline(views, departures) == expected


def test_the_reason_names_the_rank_and_the_step() -> None:
    [(group, reason)] = plan([view(0, 5)], Departures(gone={(1, 1)})).dead
    assert group.slots == ((1, 0, 0),)
    assert reason == "local rank 1 ended before it sealed step 5"


def test_equal_steps_of_two_launches_are_kept_apart() -> None:
    assert outline([view(0, 5), view(1, 5, launch=2)], Departures()) == ([], [])
