"""What the facts of a journal line must be for those who read them.

A line is data of whoever wrote it. Readers index it, compare it and compute with it, so a line
whose facts have other types than its kind has is damage, as a torn line is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from holdfast.contracts.bounds import INTEGER_MAX
from holdfast.contracts.states import AttemptState

_WHOLE: Final = frozenset(
    {
        *("attempt", "launch", "step", "first_step", "last_step", "committed_step"),
        *("newest_step", "world_size", "gpus", "after_attempt", "node", "rank", "count", "pid"),
        *("rounds", "exit_code", "bytes"),
    }
)
_TEXT: Final = frozenset(
    {
        *("checkpoint", "to", "action", "by", "state", "cause", "host", "error", "reason", "path"),
        *("url", "flow_run", "job_id", "note", "into_uid", "into_run", "format", "text", "finding"),
        *("resumed_from", "command_digest", "traceback", "ending", "source", "problem"),
    }
)
_TEXTS: Final = frozenset({"evidence", "hosts", "excluded", "skipped", "exclude", "dumps"})
_WORDS_OF_STATE: Final = frozenset(AttemptState)
# Facts that must be there, by kind.
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "attempt_state": ("state",),
    "attempt_ended": ("state",),
    "pinned": ("checkpoint",),
    "unpinned": ("checkpoint",),
    "checkpoint_deleted": ("checkpoint",),
    "forked": ("checkpoint",),
    "exported": ("checkpoint", "path"),
    "operator_request": ("action",),
    "decision": ("action",),
    "save_failed": ("checkpoint", "step", "error"),
    "node_lost": ("host",),
    "hang_suspected": ("finding",),
    "hang_confirmed": ("finding",),
    "straggler": ("rank", "own_s", "peers_s"),
    "node_silent": ("silent", "nodes"),
    "numerics": ("action", "reason"),
}


def problem_with_facts(kind: str, facts: Mapping[str, Any]) -> str | None:
    """What is wrong with the facts of a line of `kind`, in words; None when nothing is."""
    for name in _NEEDED.get(kind, ()):
        if facts.get(name) is None:
            return f"{name} is missing"
    for name, value in facts.items():
        if value is not None and not _fits(name, value):
            return f"{name} is a {type(value).__name__} that cannot be meant"
    if kind == "node_silent" and not _are_texts(facts["nodes"]):
        return "nodes is no list of names"
    if kind in {"attempt_state", "attempt_ended"} and facts["state"] not in _WORDS_OF_STATE:
        return "state is no state of an attempt"
    return None


def _fits(name: str, value: Any) -> bool:
    kind = type(value)
    if name in _WHOLE:
        return kind is int and abs(value) <= INTEGER_MAX
    if name in _TEXT:
        return kind is str
    if name in _TEXTS:
        return _are_texts(value)
    if name == "skip":
        return kind is list and all(_is_pair(item) for item in value)
    if name.endswith(("_s", "_at")):
        return kind is int or (kind is float and math.isfinite(value))
    return True


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(type(item) is int and abs(item) <= INTEGER_MAX for item in value)
