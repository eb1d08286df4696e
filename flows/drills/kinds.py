"""The kinds of fault: what each does, what should come of it, and which are drawn. Pure."""

from __future__ import annotations

import difflib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.contracts.errors import SpecError
from holdfast.contracts.journal import EventKind
from holdfast.contracts.states import Cause

# How a straggler is held up, again and again: far above what makes a rank a slow one.
HELD_S: Final = 0.12
FREE_S: Final = 0.04


class Recovery(StrEnum):
    """How a run goes on after a fault."""

    UNDISTURBED = "undisturbed"
    IN_PLACE = "in place"
    NEW_ATTEMPT = "new attempt"


class Loss(StrEnum):
    """The most that a fault may cost: nothing, what no snapshot has, what no checkpoint has."""

    NOTHING = "nothing"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault. `causes` are those that may end an attempt by it, `reported_by` are the
    journal lines that may be the first to tell of it; none where no journal does.

    `is_for_live` tells whether it can be rehearsed on a run that people care about: nothing of
    it outlives the drill, and it reaches no other run. `steps` of a throw-away run pass at most
    while it is rehearsed and recovered from.
    """

    name: str
    words: str
    recovery: Recovery
    loss: Loss = Loss.NOTHING
    causes: frozenset[Cause] = frozenset()
    reported_by: frozenset[EventKind] = frozenset()
    is_for_live: bool = True
    steps: int = 300


def _kinds(*kinds: Kind) -> dict[str, Kind]:
    return {kind.name: kind for kind in kinds}


KINDS: Final = _kinds(
    Kind(
        name="sigterm",
        words="the agent gets SIGTERM, as at a preemption",
        recovery=Recovery.NEW_ATTEMPT,
        causes=frozenset({Cause.PREEMPTION}),
        reported_by=frozenset({EventKind.SIGNAL}),
    ),
    Kind(
        name="sigusr2",
        words="the agent gets SIGUSR2, as Slurm warns",
        recovery=Recovery.NEW_ATTEMPT,
        causes=frozenset({Cause.PREEMPTION}),
        reported_by=frozenset({EventKind.SIGNAL}),
    ),
    Kind(
        name="spot-notice",
        words="a cloud announces that the machine is taken",
        recovery=Recovery.NEW_ATTEMPT,
        causes=frozenset({Cause.PREEMPTION}),
        reported_by=frozenset({EventKind.NOTICE, EventKind.SIGNAL}),
        is_for_live=False,
    ),
    Kind(
        name="kill-rank",
        words="one training process gets SIGKILL",
        recovery=Recovery.IN_PLACE,
        loss=Loss.SNAPSHOT,
        reported_by=frozenset({EventKind.LAUNCH_ENDED}),
    ),
    Kind(
        name="kill-torchrun",
        words="torchrun gets SIGKILL",
        recovery=Recovery.IN_PLACE,
        loss=Loss.SNAPSHOT,
        reported_by=frozenset({EventKind.LAUNCH_ENDED}),
    ),
    Kind(
        name="kill-agent",
        words="the agent gets SIGKILL",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.CHECKPOINT,
        causes=frozenset({Cause.INFRASTRUCTURE, Cause.NODE_FAILURE}),
        reported_by=frozenset(
            {EventKind.NODE_LOST, EventKind.NODE_SILENT, EventKind.ATTEMPT_ENDED}
        ),
    ),
    Kind(
        name="kill-flow",
        words="the supervising flow gets SIGKILL, now and then while it relaunches",
        recovery=Recovery.UNDISTURBED,
    ),
    Kind(
        name="kill-flusher",
        words="the flusher gets SIGKILL",
        recovery=Recovery.UNDISTURBED,
    ),
    Kind(
        name="hang",
        words="one training process is stopped, and its peers wait for it",
        recovery=Recovery.IN_PLACE,
        loss=Loss.SNAPSHOT,
        reported_by=frozenset({EventKind.HANG_SUSPECTED}),
    ),
    Kind(
        name="straggler",
        words="one training process is held up for most of the time until it is named",
        recovery=Recovery.UNDISTURBED,
        reported_by=frozenset({EventKind.STRAGGLER}),
        steps=1000,
    ),
    Kind(
        name="node-loss",
        words="every process of the attempt is gone at one moment",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.CHECKPOINT,
        causes=frozenset({Cause.INFRASTRUCTURE, Cause.NODE_FAILURE}),
        reported_by=frozenset(
            {EventKind.NODE_LOST, EventKind.NODE_SILENT, EventKind.ATTEMPT_ENDED}
        ),
    ),
    Kind(
        name="disk-full",
        words="the file system of the runs is filled, and freed after a save failed",
        recovery=Recovery.UNDISTURBED,
        reported_by=frozenset({EventKind.SAVE_FAILED}),
        is_for_live=False,
    ),
    Kind(
        name="database-down",
        words="the lineage database is unreadable for a while, then lost, and made again from disk",
        recovery=Recovery.UNDISTURBED,
        is_for_live=False,
    ),
    Kind(
        name="prefect-down",
        words="the Prefect server of the flow is killed, and started again while training goes on",
        recovery=Recovery.UNDISTURBED,
        is_for_live=False,
        steps=3000,
    ),
    Kind(
        name="corrupt-checkpoint",
        words="a byte of the newest checkpoint is flipped before a resume, and put back after it",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.CHECKPOINT,
        causes=frozenset({Cause.PREEMPTION}),
    ),
    Kind(
        name="nan",
        words="the inputs of one step are no numbers, and so are its loss and the weights; a run "
        "stops, goes back or skips data by its policy",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.CHECKPOINT,
        causes=frozenset({Cause.NUMERICS}),
        reported_by=frozenset({EventKind.NUMERICS}),
        is_for_live=False,
    ),
    Kind(
        name="oom",
        words="one training process is refused any more memory",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.SNAPSHOT,
        causes=frozenset({Cause.HOST_OOM}),
        reported_by=frozenset({EventKind.LAUNCH_ENDED}),
    ),
)


def select_kinds(wanted: Sequence[str], *, is_live: bool, missing: Collection[str]) -> list[Kind]:
    """The kinds called `wanted`, or all that can be rehearsed here; `missing` cannot be.

    Raises `SpecError` for a name that is not known, and for one that cannot be rehearsed here.
    """
    able = [k for k in KINDS.values() if k.name not in missing and (k.is_for_live or not is_live)]
    for name in wanted:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}?" if near else f"expected {', '.join(KINDS)}"
            raise SpecError(f"{name!r}: no such kind of fault; {hint}")
        if KINDS[name] not in able:
            why = "on a live run" if is_live and not KINDS[name].is_for_live else "on this machine"
            raise SpecError(f"{name}: cannot be rehearsed {why}; leave it out")
    return [kind for kind in able if kind.name in wanted or not wanted]


def draw_faults(kinds: Sequence[Kind], count: int, seed: int) -> list[Kind]:
    """`count` faults in an order that follows from `seed`, each kind as often as any other."""
    order = random.Random(seed)
    drawn: list[Kind] = []
    while len(drawn) < count:
        drawn += order.sample(list(kinds), len(kinds))
    return drawn[:count]
