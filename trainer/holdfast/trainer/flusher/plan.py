"""Decide which staged steps to write and which to give up: a pure function of the slots.

A step is written when every local rank has sealed it, even if all ranks are dead. A step is given
up when one rank will never seal it: the rank ended, continued with a later step, or belongs to an
earlier launch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.trainer.slots.slots import SlotState

SlotKey = tuple[int, int, int]
"""(launch, rank, slot number)"""

_HAS_STEP = frozenset(SlotState) - {SlotState.EMPTY}


@dataclass(frozen=True, kw_only=True)
class SlotView:
    """One slot at one moment. Its checkpoint and local rank are known once it is sealed.

    `is_former`: the rank will not fill this slot again, because it has new slots or is gone.
    """

    key: SlotKey
    state: SlotState
    step: int
    local_rank: int | None = None
    local_ranks: int = 0
    checkpoint: str = ""
    is_former: bool = False

    @property
    def launch(self) -> int:
        return self.key[0]


@dataclass(frozen=True)
class StepGroup:
    """The sealed slots of one step of one launch on this node."""

    launch: int
    step: int
    checkpoint: str
    slots: tuple[SlotKey, ...]


@dataclass(frozen=True)
class Departures:
    """The ranks that ended, as (launch, local rank), and the number of the newest launch."""

    gone: Collection[tuple[int, int]] = ()
    newest_launch: int = 0


@dataclass(frozen=True)
class FlushPlan:
    """`ready` in write order; `dead` with the reason why each was given up."""

    ready: tuple[StepGroup, ...]
    dead: tuple[tuple[StepGroup, str], ...]


def plan(views: Sequence[SlotView], departures: Departures) -> FlushPlan:
    """Sort the sealed steps into steps to write, steps to give up, and steps to wait for."""
    members: dict[tuple[int, int, str], list[SlotView]] = {}
    for view in views:
        # An unsealed slot has no readable table yet, so its local rank is unknown.
        if view.state is SlotState.SEALED and view.local_rank is not None:
            key = (view.launch, view.step, view.checkpoint)
            members.setdefault(key, []).append(view)
    ready, dead = [], []
    for (launch, step, checkpoint), sealed in sorted(members.items()):
        group = StepGroup(launch, step, checkpoint, tuple(sorted(v.key for v in sealed)))
        missing = set(range(sealed[0].local_ranks)) - {v.local_rank for v in sealed}
        if not missing:
            ready.append(group)
        elif reason := _why_never(group, missing, views, departures):
            dead.append((group, reason))
    return FlushPlan(tuple(ready), tuple(dead))


def _why_never(
    group: StepGroup,
    missing: Collection[int | None],
    views: Sequence[SlotView],
    departures: Departures,
) -> str | None:
    """Return why the step can never be complete, or None while it still can."""
    for local in sorted(rank for rank in missing if rank is not None):
        if (group.launch, local) in departures.gone:
            return f"local rank {local} ended before it sealed step {group.step}"
        newest = max(
            (
                v.step
                for v in views
                if v.launch == group.launch
                and v.local_rank == local
                and v.state in _HAS_STEP
                # Slots of an earlier engine say nothing about the steps of the present one.
                and not v.is_former
            ),
            default=group.step,
        )
        # Ranks seal steps in order, so a rank with a later step never seals this one.
        if newest > group.step:
            return f"local rank {local} went on to step {newest} without sealing {group.step}"
    if group.launch < departures.newest_launch:
        return f"launch {group.launch} ended before all its ranks sealed {group.step}"
    return None
