"""Whether a run's program saves by Holdfast, judged by its attempts. Pure functions.

A program without a `Session` trains and completes, and nothing of it is saved. A `Session` and the
drop-in for DCP journal that they began or committed. A launch that did neither has no state that
Holdfast could keep.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.plain_text import unix_time
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.spec.part import section
from holdfast.contracts.states import AttemptState

# How long a program may import and build its model before it makes its Session.
SESSION_WAIT_S: Final = 600.0


class Trained(NamedTuple):
    """What an attempt shows: whether it `saves` through Holdfast, and the seconds that it ran."""

    state: str
    saves: bool
    ran_s: float | None


def trained_in(history: RunHistory, now: float | None = None) -> list[Trained]:
    """Return what the attempts of a run show. `now` is Unix seconds, by default the present."""
    now = time.time() if now is None else now
    # Both lines mean a Session: `resumed` is written at every start, even at step 0.
    begun = {e.data.get("attempt") for e in history.events if e.kind is EventKind.RESUMED}
    saving = begun | history.tally.commits.keys()
    watched = history.spec.program.is_watched
    return [
        Trained(
            one.state.value,
            watched or one.number in saving or one.first_step is not None,
            None if one.started_at is None else (one.ended_at or now) - one.started_at,
        )
        for one in history.attempts
    ]


def trained_in_view(view: Mapping[str, Any], now: float | None = None) -> list[Trained]:
    """Return the same of a run in the index: `lineage.views.RunView`."""
    now = time.time() if now is None else now
    program = section(view["spec"], "program")
    # The newest committed step speaks for all attempts.
    watched = bool(program.get("checkpoints")) or view["step"] is not None
    found = []
    for one in view["attempts"]:
        began, ended = unix_time(one["started_at"]), unix_time(one["ended_at"])
        signs = (one["first_step"], one["committed_step"], one["resumed_step"])
        saves = watched or any(sign is not None for sign in signs)
        found.append(Trained(one["state"], saves, began and (ended or now) - began))
    return found


def saves_by_holdfast(attempts: Sequence[Trained]) -> bool | None:
    """Return whether the program saves by Holdfast; None if that is not known yet.

    Every attempt runs the same command, so one that saved speaks for all. An attempt that completed
    or ran for long without a sign of a Session has none.
    """
    if any(one.saves for one in attempts):
        return True
    if any(
        one.state == AttemptState.COMPLETED or (one.ran_s or 0.0) >= SESSION_WAIT_S
        for one in attempts
    ):
        return False
    return None


def why_nothing_is_saved(attempts: Sequence[Trained]) -> str:
    """Return why a run has no checkpoint and gets none at a stop now; '' if it saves.

    Also '' before its first attempt has started.
    """
    if saves_by_holdfast(attempts) or not any(one.ran_s is not None for one in attempts):
        return ""
    if any(one.state == AttemptState.COMPLETED for one in attempts):
        return "the program has no Session, so nothing is saved"
    return "no rank has opened a Session so far, so nothing is saved"
