"""The operator requests for a run and the state of its supervisor."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.api.schemas import OperatorRequest, Supervision
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.plain_text import unix_time
from holdfast.contracts.records.orders import fold_orders
from holdfast.contracts.records.supervision import is_supervised
from holdfast.contracts.states import AttemptState, RunState
from holdfast.lineage.queries.views import RunView
from holdfast.workers.runs.operator import ACTIONS, problem_with_state

# A flow that has just started imports Prefect before it takes the run's lock.
STARTING_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """An attempt as the index has it."""

    number: int
    state: AttemptState
    job_id: str | None


def requests_in(events: Sequence[Event], shown: RunView) -> list[OperatorRequest]:
    """Return the operator requests among `events`, oldest first; `shown` is the run's row."""
    attempts = [
        _Attempt(
            number=row["number"],
            state=AttemptState(row["state"]),
            job_id=row["job_id"],
        )
        for row in shown["attempts"]
    ]
    is_live = RunState(shown["state"]).is_live
    # The same computation as on disk: the state of an order is never stored, see decision 85.
    orders = fold_orders(events, attempts, is_live=is_live, why=shown["reason"] or "")
    return [
        OperatorRequest.model_validate(order, from_attributes=True)
        for order in orders
        if order.checkpoint is None
    ]


def refusals(shown: RunView, *, is_on_disk: bool) -> dict[str, str]:
    """Return the reason for each action that a run would refuse now; `shown` is its row."""
    if not is_on_disk:
        reason = "The run's folder does not exist, or its root is not mounted."
        return dict.fromkeys(ACTIONS, reason)
    last = shown["attempts"][-1] if shown["attempts"] else None
    is_completed = last is not None and last["state"] == AttemptState.COMPLETED
    # Evidence of a completed attempt says what its agent could not confirm.
    may_lack_steps = last is not None and is_completed and bool(last["evidence"])
    found = {
        action: problem_with_state(
            shown["run"],
            action,
            RunState(shown["state"]),
            may_lack_steps=may_lack_steps,
            # Whether a request is pending is known only on disk, so the run itself judges it.
            is_pausing=action == "resume",
        )
        for action in ACTIONS
    }
    return {action: reason for action, reason in found.items() if reason}


def read_supervision(
    paths: RunPaths, events: Sequence[Event], created_at: str, seen_at: float | None = None
) -> Supervision:
    """Return the state of a live run's supervisor; `events` are from `store.STEERING`.

    `seen_at` is when this server last saw one.
    """
    newest = next((e for e in reversed(events) if e.kind is EventKind.SUPERVISED), None)
    facts = newest.data if newest else {}
    host = str(facts.get("host") or "") or None
    is_alive: bool | None = is_supervised(paths.flow_lock)
    requests = (event.time for event in events if event.kind is EventKind.OPERATOR_REQUEST)
    asked = max(requests, default=unix_time(created_at) or 0.0)
    # A supervisor that took the lock since then, and holds it no more, is not about to start.
    started = max(newest.time if newest else 0.0, seen_at or 0.0)
    # Other hosts wrote these times. One that is far in the future proves nothing.
    if not is_alive and started <= asked and abs(time.time() - asked) < STARTING_S:
        is_alive = None
    return Supervision(
        is_alive=is_alive,
        is_remote=host is not None and host != socket.gethostname(),
        host=host,
        pid=facts.get("pid"),
    )
