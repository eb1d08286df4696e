"""The nodes that attempts ran on, and which of them is to blame when one ended badly. Pure."""

from __future__ import annotations

from typing import Any

from holdfast.contracts.history import AttemptView, RunHistory
from holdfast.contracts.journal import EventKind
from holdfast.contracts.states import Cause

Row = dict[str, Any]

# Causes for which a node answers when nobody says which: the whole attempt's are blamed on none.
_ALONE = frozenset({Cause.NODE_FAILURE, Cause.HOST_OOM, Cause.GPU_OOM, Cause.INFRASTRUCTURE})
# Causes that may lie in the node that failed first. A program's error, its losses, a preemption
# and an operator's word are no fault of the machine on which they showed.
_OF_MACHINES = _ALONE | {Cause.HANG, Cause.UNKNOWN}


def node_rows(history: RunHistory) -> list[Row]:
    """A row for each attempt and host."""
    lost: dict[int, set[str]] = {}
    for event in history.events:
        attempt, host = event.data.get("attempt"), event.data.get("host")
        if event.kind is EventKind.NODE_LOST and host and isinstance(attempt, int):
            lost.setdefault(attempt, set()).add(str(host))
    return [
        row for view in history.attempts for row in _rows(history, view, lost.get(view.number, ()))
    ]


def _rows(history: RunHistory, view: AttemptView, lost: Any) -> list[Row]:
    failed = view.outcome.failed_host if view.outcome else None
    hosts = dict.fromkeys([*view.hosts, *sorted(lost), *([failed] if failed else [])])
    blamed = set(lost) or ({failed} if failed else set())
    if not blamed and len(hosts) == 1 and view.cause in _ALONE:
        blamed = set(hosts)
    return [
        {
            "run_uid": history.record.uid,
            "attempt": view.number,
            "host": host,
            "fault": _fault(view, host in lost) if host in blamed else None,
            "started_at": view.started_at,
            "ended_at": view.ended_at,
        }
        for host in hosts
    ]


def _fault(view: AttemptView, is_lost: bool) -> str | None:
    """A node that was lost failed, whatever the attempt made of it."""
    if is_lost:
        return Cause.NODE_FAILURE.value
    return view.cause.value if view.cause in _OF_MACHINES else None
