"""The operator requests for a run and the state of its supervisor."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from holdfast.api.schemas import OperatorRequest, Supervision
from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.supervision import is_supervised

# A flow that has just started imports Prefect before it takes the run's lock.
STARTING_S: Final = 60.0


def requests_in(events: Sequence[Event]) -> list[OperatorRequest]:
    """Return the operator requests among `events`."""
    return [
        OperatorRequest(
            action=str(event.data.get("action")),
            by=str(event.data.get("by") or "unknown"),
            at=event.time,
            gpus=event.data.get("gpus"),
            after_attempt=int(event.data.get("after_attempt") or 0),
        )
        for event in events
        if event.kind is EventKind.OPERATOR_REQUEST
    ]


def read_supervision(paths: RunPaths, events: Sequence[Event], created_at: str) -> Supervision:
    """Return the state of a live run's supervisor; `events` are from `Store.steering_events`."""
    newest = next((e for e in reversed(events) if e.kind is EventKind.SUPERVISED), None)
    facts = newest.data if newest else {}
    host = str(facts.get("host") or "") or None
    is_alive: bool | None = is_supervised(paths.flow_lock)
    began = datetime.fromisoformat(created_at).timestamp()
    asked = max((event.time for event in events), default=began)
    if not is_alive and time.time() - max(began, asked) < STARTING_S:
        is_alive = None
    return Supervision(
        is_alive=is_alive,
        is_remote=host is not None and host != socket.gethostname(),
        host=host,
        pid=facts.get("pid"),
    )
