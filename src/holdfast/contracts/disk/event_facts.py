"""Checks of the facts (the `data`) of journal lines.

Other users may have written a line. Readers index its facts, compare them and compute with them, so
a line with facts of a wrong type counts as damaged and is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.contracts.disk.bounds import BYTES_MAX, NUMBER_MAX, RANKS_MAX, STEP_MAX, TIME_MAX
from holdfast.contracts.states import AttemptState

# Whole numbers and the largest absolute value of each.
_WHOLE: Final[Mapping[str, int]] = {
    **dict.fromkeys(("step", "first_step", "last_step"), STEP_MAX),
    **dict.fromkeys(("committed_step", "newest_step"), STEP_MAX),
    **dict.fromkeys(("attempt", "launch", "after_attempt", "node", "rank"), NUMBER_MAX),
    **dict.fromkeys(("count", "pid", "rounds", "exit_code", "place"), NUMBER_MAX),
    **dict.fromkeys(("order", "overtakes"), NUMBER_MAX),
    **dict.fromkeys(("world_size", "gpus"), RANKS_MAX),
    "bytes": BYTES_MAX,
}
_TEXT: Final = frozenset(
    {
        *("checkpoint", "to", "action", "by", "state", "cause", "host", "error", "reason", "path"),
        *("url", "flow_run", "job_id", "note", "into_uid", "into_run", "format", "text", "finding"),
        *("resumed_from", "command_digest", "traceback", "ending", "source", "problem"),
        *("check", "digest", "tracker", "tracker_id", "key", "metric"),
    }
)
_TEXTS: Final = frozenset(
    {"evidence", "hosts", "excluded", "skipped", "exclude", "dumps", "unhealthy_hosts"}
)
_STATES: Final = frozenset(AttemptState)
# Required facts, by kind.
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "attempt_state": ("state",),
    "attempt_ended": ("state",),
    "pinned": ("checkpoint",),
    "unpinned": ("checkpoint",),
    "checkpoint_deleted": ("checkpoint",),
    "forked": ("checkpoint",),
    "exported": ("checkpoint", "path"),
    "imported": ("checkpoint", "path"),
    "operator_request": ("action",),
    "order_state": ("order", "state"),
    "decision": ("action",),
    "save_failed": ("checkpoint", "step", "error"),
    "node_lost": ("host",),
    "hang_suspected": ("finding",),
    "hang_confirmed": ("finding",),
    "straggler": ("rank", "own_s", "peers_s"),
    "node_silent": ("silent", "nodes"),
    "node_unhealthy": ("host", "check"),
    "numerics": ("action", "reason"),
    "limit_passed": ("limit", "passed", "text"),
    "metric_missing": ("key", "metric", "missing", "text"),
    "tracked": ("tracker", "tracker_id"),
}


def needed_facts(kind: str) -> tuple[str, ...]:
    """The facts that a line of `kind` must have."""
    return _NEEDED.get(kind, ())


def problem_with_facts(kind: str, facts: Mapping[str, Any]) -> str | None:
    """Return the problem with the facts of a line of `kind` as text, or None."""
    for name in needed_facts(kind):
        if facts.get(name) is None:
            return f"{name} is missing"
    for name, value in facts.items():
        if value is not None and not _fits(name, value):
            return f"{name} has an invalid value of type {type(value).__name__}"
    if kind == "node_silent" and not _are_texts(facts["nodes"]):
        return "nodes is not a list of names"
    if kind == "limit_passed" and type(facts["limit"]) is not str:
        return "limit is not the name of a limit"
    if kind in {"attempt_state", "attempt_ended"} and facts["state"] not in _STATES:
        return "state is not a state of an attempt"
    return None


def _fits(name: str, value: Any) -> bool:
    kind = type(value)
    if name == "skip":
        return kind is list and all(_is_pair(item) for item in value)
    if name in _WHOLE:
        return kind is int and abs(value) <= _WHOLE[name]
    if name in _TEXT:
        return kind is str
    if name in _TEXTS:
        return _are_texts(value)
    if name.endswith("_at"):
        return kind in {int, float} and 0 <= value <= TIME_MAX
    if name.endswith("_s"):
        # The clocks of two machines may differ by any time.
        return kind in {int, float} and abs(value) <= TIME_MAX
    return True


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(type(item) is int and abs(item) <= STEP_MAX for item in value)
