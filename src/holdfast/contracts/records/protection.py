"""What a launch lacks to survive the loss of a node: copies at a neighbour, or spare nodes.

The agents journal it when it begins and when it ends. A launch begins as protected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Literal, TypedDict

from holdfast.contracts.disk.journal import Event, EventKind

Lack = Literal["copies", "spares"]
COPIES: Final[Lack] = "copies"
SPARES: Final[Lack] = "spares"
# The kinds of journal lines that `unprotected_in` reads.
LAUNCHES: Final = (EventKind.LAUNCH_STARTED, EventKind.LAUNCH_ENDED)
NO_OTHER_NODE: Final = "there is no other node to copy snapshots to"
SHORT_STEPS: Final = "the steps are too short for the nodes to copy the same one"
SLOW_COPIES: Final = (
    "no snapshot was copied while two checkpoints were written: the network is too slow, or no "
    "snapshots are taken"
)
# What helps, by the problem. The first match counts.
_ADVICE: Final = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"MiB of memory", "give the job more memory per node, or leave out checkpoint.neighbour"),
        (re.escape(NO_OTHER_NODE), "train on two nodes or more, or leave out checkpoint.neighbour"),
        (re.escape(SHORT_STEPS), "set checkpoint.snapshots to a number of steps"),
        (re.escape(SLOW_COPIES), "set a larger checkpoint.interval, or use a faster network"),
    )
)
_ADVICE_COPIES: Final = "check the network between the nodes, and the log of the node's flusher"
_ADVICE_SPARES: Final = (
    "Relaunch the run at a convenient time to get spare nodes again. Until then, a lost node costs "
    "a relaunch, or an elastic run some of its GPUs"
)


class Lacking(TypedDict):
    """Something that a running launch lacks. `host` is None if it concerns all of its nodes.

    `at` is Unix seconds.
    """

    lacks: Lack
    host: str | None
    text: str
    action: str
    at: float


class ProtectionNotes:
    """Finds when something begins and ceases to lack. One thread uses it."""

    def __init__(self, lacks: Lack, attempt: int, host: str | None = None) -> None:
        self._lacks, self._attempt, self._host = lacks, attempt, host
        self._launch, self._problem = 0, ""

    def change(self, launch: int, problem: str) -> dict[str, Any]:
        """Return the facts of the journal line about a change of `problem`; {} without one.

        An empty problem is the end of one.
        """
        if launch != self._launch:
            self._launch, self._problem = launch, ""
        if bool(problem) == bool(self._problem):
            return {}
        self._problem = problem
        facts: dict[str, Any] = {"attempt": self._attempt, "launch": launch}
        if self._host is not None:
            facts["host"] = self._host
        return {**facts, "lacks": self._lacks, "unprotected": problem}


def unprotected_in(events: Iterable[Event]) -> list[Lacking]:
    """Return what the running launch lacks; [] if none runs.

    Clocks of nodes differ, so the numbers of launches count, and not the order of lines.
    """
    started, ended = (0, 0), (0, 0)
    newest: dict[tuple[str, str], tuple[tuple[int, int], Event]] = {}
    for event in events:
        place = _place(event)
        if event.kind is EventKind.LAUNCH_STARTED:
            started = max(started, place)
        elif event.kind is EventKind.LAUNCH_ENDED:
            ended = max(ended, place)
        elif event.kind is EventKind.PROTECTION:
            key = (str(event.data.get("lacks")), str(event.data.get("host") or ""))
            if key not in newest or place >= newest[key][0]:
                newest[key] = (place, event)
    if ended >= started:
        return []
    here = [event for place, event in newest.values() if place == started]
    found = [_unprotected(event) for event in here if event.data.get("unprotected")]
    return sorted(found, key=lambda one: (one["lacks"], one["host"] or ""))


def summary_of(found: Iterable[Lacking], lacks: Lack) -> Lacking | None:
    """Return the earliest of what is lacking in one way, and how many other nodes it concerns."""
    same = sorted((one for one in found if one["lacks"] == lacks), key=lambda one: one["at"])
    if not same:
        return None
    first, others = same[0], len(same) - 1
    also = f"; the same on {others} other node{'s' if others > 1 else ''}" if others else ""
    return {**first, "text": first["text"] + also}


def _place(event: Event) -> tuple[int, int]:
    attempt, launch = event.data.get("attempt"), event.data.get("launch")
    if isinstance(attempt, int) and isinstance(launch, int):
        return attempt, launch
    return 0, 0


def _unprotected(event: Event) -> Lacking:
    problem, host = str(event.data.get("unprotected")), event.data.get("host")
    lacks: Lack = SPARES if event.data.get("lacks") == SPARES else COPIES
    where = f"{host}: " if host else ""
    action = _ADVICE_SPARES
    if lacks == COPIES:
        action = next((text for seen, text in _ADVICE if seen.search(problem)), _ADVICE_COPIES)
    return {
        "lacks": lacks,
        "host": str(host) if host else None,
        "text": f"{where}{problem}",
        "action": action,
        "at": event.time,
    }
