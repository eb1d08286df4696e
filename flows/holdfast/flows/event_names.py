"""The names of Prefect events, and the part of a run that each is about. Without Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.states import Cause

ATTEMPT: Final = "attempt"
CHECKPOINT: Final = "checkpoint"
PREEMPTION: Final = "preemption"
PREFIX: Final = "holdfast"

# Journal lines that Prefect gets, and their names there. `*` is a word from the line itself.
NAMES: Final[Mapping[EventKind, str]] = {
    EventKind.SUPERVISED: "run.supervised",
    EventKind.OPERATOR_REQUEST: "run.requested",
    EventKind.DECISION: "run.decided",
    EventKind.RUN_ENDED: "run.*",
    EventKind.ATTEMPT_RESERVED: "attempt.reserved",
    EventKind.ATTEMPT_SUBMITTED: "attempt.submitted",
    EventKind.ATTEMPT_STATE: "attempt.*",
    EventKind.CLAIMED: "attempt.claimed",
    EventKind.LAUNCH_STARTED: "attempt.launched",
    EventKind.LAUNCH_ENDED: "attempt.launch-ended",
    EventKind.RESUMED: "attempt.resumed",
    EventKind.SIGNAL: "attempt.stopping",
    EventKind.STOP_FAILED: "attempt.stop-failed",
    EventKind.ATTEMPT_ENDED: "attempt.ended",
    EventKind.GOODPUT: "attempt.accounted",
    EventKind.HANG_SUSPECTED: "attempt.hang-suspected",
    EventKind.HANG_CLEARED: "attempt.hang-cleared",
    EventKind.HANG_CONFIRMED: "attempt.hang-confirmed",
    EventKind.STRAGGLER: "attempt.straggler-found",
    EventKind.NODE_LOST: "attempt.node-lost",
    EventKind.NODE_SILENT: "attempt.node-silent",
    EventKind.NODE_UNHEALTHY: "attempt.node-unhealthy",
    EventKind.LIMIT_PASSED: "run.*",
    EventKind.NUMERICS: "attempt.bad-loss",
    EventKind.ROLLED_BACK: "attempt.rolled-back",
    EventKind.NOTICE: "preemption.noticed",
    EventKind.COMMITTED: "checkpoint.committed",
    EventKind.SAVE_FAILED: "checkpoint.save-failed",
    EventKind.MIRRORED: "checkpoint.mirrored",
    EventKind.MIRROR_FAILED: "checkpoint.mirror-failed",
    EventKind.FETCHED: "checkpoint.fetched",
    EventKind.VERIFIED: "checkpoint.*",
    EventKind.PINNED: "checkpoint.pinned",
    EventKind.UNPINNED: "checkpoint.unpinned",
    EventKind.CHECKPOINT_DELETED: "checkpoint.pruned",
    EventKind.FORKED: "checkpoint.forked",
    EventKind.EXPORTED: "checkpoint.exported",
    EventKind.IMPORTED: "checkpoint.imported",
}


def event_name(event: Event) -> str:
    """Return the name of the Prefect event for a journal line, or '' if Prefect does not get it."""
    if event.kind not in NAMES:
        return ""
    kind, facts = EventKind(event.kind), event.data
    name = NAMES[kind]
    if kind is EventKind.SIGNAL and facts.get("cause") == Cause.PREEMPTION:
        name = NAMES[EventKind.NOTICE]
    elif kind is EventKind.VERIFIED:
        name = name.replace("*", "verified" if facts.get("ok") else "damaged")
    elif kind is EventKind.LIMIT_PASSED:
        name = name.replace("*", "limit-passed" if facts["passed"] else "within-limit")
    elif "*" in name:
        name = name.replace("*", str(facts.get("state", "ended")).replace("_", "-"))
    return f"{PREFIX}.{name}"


def subject(event: Event) -> str:
    """Return what the event is about: `run`, `attempt` or `checkpoint`."""
    part = NAMES[EventKind(event.kind)].partition(".")[0]
    return ATTEMPT if part == PREEMPTION else part
