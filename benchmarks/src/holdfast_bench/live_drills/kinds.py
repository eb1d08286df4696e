"""The kinds of fault, their expected effects, and their random selection. Pure functions."""

from __future__ import annotations

import difflib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import SpecError
from holdfast.contracts.states import Cause

# How long a straggler is suspended and free in turn: far above the threshold for a slow rank.
HELD_S: Final = 0.12
FREE_S: Final = 0.04
# How long an attempt is suspended: longer than the silence that means a hang in a drilled run.
SUSPENDED_S: Final = 12.0


class Recovery(StrEnum):
    """How a run continues after a fault."""

    UNDISTURBED = "undisturbed"
    IN_PLACE = "in place"
    NEW_ATTEMPT = "new attempt"


class Loss(StrEnum):
    """The most that a fault may cost: nothing, or the steps since a snapshot or a checkpoint.

    `COPY` is the newest snapshot of which a neighbour holds a copy.
    """

    NOTHING = "nothing"
    SNAPSHOT = "snapshot"
    COPY = "copy"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault.

    `causes` are the expected causes of an attempt that it ends. `reported_by` are the journal lines
    that may report it first; empty if the journal does not report it. `is_for_live` is whether it
    can be rehearsed on a real run, because it leaves nothing behind and affects no other run.
    `steps` is the maximum number of steps that a temporary run trains meanwhile. `has_own_job` is
    whether a drill without a run rehearses it on a job of several nodes, which ends after it.
    """

    name: str
    summary: str
    recovery: Recovery
    loss: Loss = Loss.NOTHING
    causes: frozenset[Cause] = frozenset()
    reported_by: frozenset[EventKind] = frozenset()
    is_for_live: bool = True
    steps: int = 300
    has_own_job: bool = False


def _kinds(*kinds: Kind) -> dict[str, Kind]:
    return {kind.name: kind for kind in kinds}


KINDS: Final = _kinds(
    Kind(
        name="sigterm",
        summary="the agent gets SIGTERM, as at a preemption",
        recovery=Recovery.NEW_ATTEMPT,
        causes=frozenset({Cause.PREEMPTION}),
        reported_by=frozenset({EventKind.SIGNAL}),
    ),
    Kind(
        name="sigusr2",
        summary="the agent gets SIGUSR2, as Slurm warns",
        recovery=Recovery.NEW_ATTEMPT,
        causes=frozenset({Cause.PREEMPTION}),
        reported_by=frozenset({EventKind.SIGNAL}),
    ),
    Kind(
        name="spot-notice",
        summary="the cloud announces that it takes the machine",
        recovery=Recovery.NEW_ATTEMPT,
        causes=frozenset({Cause.PREEMPTION}),
        reported_by=frozenset({EventKind.NOTICE, EventKind.SIGNAL}),
        is_for_live=False,
    ),
    Kind(
        name="kill-rank",
        summary="one training process gets SIGKILL",
        recovery=Recovery.IN_PLACE,
        loss=Loss.SNAPSHOT,
        reported_by=frozenset({EventKind.LAUNCH_ENDED}),
    ),
    Kind(
        name="kill-torchrun",
        summary="torchrun gets SIGKILL",
        recovery=Recovery.IN_PLACE,
        loss=Loss.SNAPSHOT,
        reported_by=frozenset({EventKind.LAUNCH_ENDED}),
    ),
    Kind(
        name="kill-agent",
        summary="the agent gets SIGKILL",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.CHECKPOINT,
        causes=frozenset({Cause.INFRASTRUCTURE, Cause.NODE_FAILURE}),
        reported_by=frozenset(
            {EventKind.NODE_LOST, EventKind.NODE_SILENT, EventKind.ATTEMPT_ENDED}
        ),
    ),
    Kind(
        name="kill-flow",
        summary="the supervisor gets SIGKILL, sometimes during a relaunch",
        recovery=Recovery.UNDISTURBED,
    ),
    Kind(
        name="kill-flusher",
        summary="the flusher gets SIGKILL",
        recovery=Recovery.UNDISTURBED,
    ),
    Kind(
        name="hang",
        summary="one training process is suspended, and its peers wait for it",
        recovery=Recovery.IN_PLACE,
        loss=Loss.SNAPSHOT,
        reported_by=frozenset({EventKind.HANG_SUSPECTED}),
    ),
    Kind(
        name="straggler",
        summary="one training process is suspended repeatedly until it is reported as slow",
        recovery=Recovery.UNDISTURBED,
        reported_by=frozenset({EventKind.STRAGGLER}),
        steps=1000,
    ),
    Kind(
        name="suspended",
        summary=f"every process of the run is suspended for {SUSPENDED_S:.0f} s, as on a machine "
        "that sleeps",
        recovery=Recovery.UNDISTURBED,
    ),
    Kind(
        name="node-loss",
        summary="every process of the attempt is killed at the same time",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.CHECKPOINT,
        causes=frozenset({Cause.INFRASTRUCTURE, Cause.NODE_FAILURE}),
        reported_by=frozenset(
            {EventKind.NODE_LOST, EventKind.NODE_SILENT, EventKind.ATTEMPT_ENDED}
        ),
    ),
    Kind(
        name="node-loss-spare",
        summary="every process of one of four nodes is killed, and a spare node takes its place",
        recovery=Recovery.IN_PLACE,
        loss=Loss.CHECKPOINT,
        reported_by=frozenset({EventKind.NODE_LOST}),
        has_own_job=True,
    ),
    Kind(
        name="node-loss-shrink",
        summary="every process of one of four nodes is killed, and fewer nodes continue",
        recovery=Recovery.IN_PLACE,
        loss=Loss.CHECKPOINT,
        reported_by=frozenset({EventKind.NODE_LOST}),
        has_own_job=True,
    ),
    Kind(
        name="neighbour-loss",
        summary="one of four nodes is killed, and its neighbour commits its snapshot; then two "
        "neighbours are killed",
        recovery=Recovery.IN_PLACE,
        loss=Loss.COPY,
        reported_by=frozenset({EventKind.NODE_LOST}),
        is_for_live=False,
        has_own_job=True,
    ),
    Kind(
        name="replica-damage",
        summary="the copy of a node's snapshots is damaged in its neighbour's memory, and the node "
        "is killed",
        recovery=Recovery.IN_PLACE,
        loss=Loss.CHECKPOINT,
        reported_by=frozenset({EventKind.NODE_LOST}),
        is_for_live=False,
        has_own_job=True,
    ),
    Kind(
        name="disk-full",
        summary="the runs' file system is full until a save fails",
        recovery=Recovery.UNDISTURBED,
        reported_by=frozenset({EventKind.SAVE_FAILED}),
        is_for_live=False,
    ),
    Kind(
        name="database-down",
        summary="the index is overwritten, set aside, and rebuilt from disk",
        recovery=Recovery.UNDISTURBED,
        is_for_live=False,
    ),
    Kind(
        name="prefect-down",
        summary="the flow's Prefect server is killed, and restarted during training",
        recovery=Recovery.UNDISTURBED,
        is_for_live=False,
        steps=3000,
    ),
    Kind(
        name="corrupt-checkpoint",
        summary="a byte of the newest checkpoint is flipped before a resume, and restored after it",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.CHECKPOINT,
        causes=frozenset({Cause.PREEMPTION}),
    ),
    Kind(
        name="nan",
        summary="the loss and the weights of one step become NaN; a run stops, rolls back or skips "
        "data, according to its policy",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.CHECKPOINT,
        causes=frozenset({Cause.NUMERICS}),
        reported_by=frozenset({EventKind.NUMERICS}),
        is_for_live=False,
    ),
    Kind(
        name="oom",
        summary="one training process cannot allocate more memory",
        recovery=Recovery.NEW_ATTEMPT,
        loss=Loss.SNAPSHOT,
        causes=frozenset({Cause.HOST_OOM}),
        reported_by=frozenset({EventKind.LAUNCH_ENDED}),
    ),
)


def select_kinds(wanted: Sequence[str], *, is_live: bool, missing: Collection[str]) -> list[Kind]:
    """Return the `wanted` kinds, or all that can be rehearsed here; `missing` ones cannot.

    Raises `SpecError` for an unknown name and for a kind that cannot be rehearsed here.
    """
    able = [k for k in KINDS.values() if k.name not in missing and (k.is_for_live or not is_live)]
    for name in wanted:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}?" if near else f"expected {', '.join(KINDS)}"
            raise SpecError(f"{name!r}: unknown kind of fault; {hint}")
        if KINDS[name] not in able:
            why = "on a live run" if is_live and not KINDS[name].is_for_live else "on this machine"
            raise SpecError(f"{name}: cannot be rehearsed {why}; leave it out")
    return [kind for kind in able if kind.name in wanted or not wanted]


def draw_faults(kinds: Sequence[Kind], count: int, seed: int) -> list[Kind]:
    """Return `count` faults in an order from `seed`, with each kind equally often."""
    order = random.Random(seed)
    drawn: list[Kind] = []
    while len(drawn) < count:
        drawn += order.sample(list(kinds), len(kinds))
    return drawn[:count]
