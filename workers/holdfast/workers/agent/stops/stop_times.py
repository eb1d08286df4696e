"""How long nodes and flushers are waited for when an attempt stops. Times are Unix seconds."""

from __future__ import annotations

from typing import Final

from holdfast.contracts.spec.supervision import Supervision
from holdfast.workers.agent.stops.sources import StopRequest

# The part of the grace that is reserved for writing the outcome before the scheduler's KILL.
RESERVE_S: Final = 1.5
CRASH_DRAIN_S: Final = 300.0
# A lost node writes no more files, so only steps that are complete without it are waited for.
LOST_DRAIN_S: Final = 30.0


def kill_at(stop_request: StopRequest, supervision: Supervision, *, has_session: bool) -> float:
    """Return when processes that still run are killed.

    A program that never used the status table cannot stop with a checkpoint, so it gets only
    the grace. One that saves by itself counts as one with a session.
    """
    limit_s = supervision.flush_timeout_s if has_session else supervision.grace_s
    at, deadline = stop_request.requested_at + limit_s, stop_request.deadline
    return at if deadline is None else min(deadline - RESERVE_S, at)


def drain_until(
    began: float, supervision: Supervision, stop_request: StopRequest | None, *, is_lost: bool
) -> float:
    """Return until when flushers that drain since `began` are waited for.

    With `is_lost`, a node is lost.
    """
    longest_s = supervision.flush_timeout_s
    if is_lost:
        longest_s = min(longest_s, LOST_DRAIN_S)
    if stop_request is None:
        return began + min(CRASH_DRAIN_S, longest_s)
    if stop_request.deadline is None:
        return began + longest_s
    return max(began + 1.0, min(stop_request.deadline, began + longest_s))
