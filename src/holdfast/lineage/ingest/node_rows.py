"""The rows of the nodes that attempts ran on, with the faults attributed to them. Pure."""

from __future__ import annotations

from typing import Any

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.states import Cause

Row = dict[str, Any]

# Causes that are attributed to the only node of an attempt if no record names a node.
_ALONE = frozenset({Cause.NODE_FAILURE, Cause.HOST_OOM, Cause.GPU_OOM, Cause.INFRASTRUCTURE})
# Causes that are attributed to the node that failed first. An error of the program, bad losses, a
# preemption and an operator's request are not faults of the machine.
_OF_MACHINES = _ALONE | {Cause.HANG, Cause.UNKNOWN}


def node_rows(history: RunHistory, view: AttemptView) -> list[Row]:
    """Return a row for each host of an attempt."""
    lost = {
        str(event.data["host"])
        for event in history.lines.by_attempt.get(view.number, ())
        if event.kind is EventKind.NODE_LOST
        and event.data.get("host")
        and isinstance(event.data.get("attempt"), int)
    }
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
    """Return the fault of a node; a lost node has a node failure, whatever the attempt's cause."""
    if is_lost:
        return Cause.NODE_FAILURE.value
    return view.cause.value if view.cause in _OF_MACHINES else None
