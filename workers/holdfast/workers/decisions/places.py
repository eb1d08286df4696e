"""Where the attempts of a run go: the first choice of `resources`, or one of its fallbacks.

A job that waits for too long goes to the next place. A run returns to its first choice when that
has had enough free GPUs for a while. `moves` acts on what is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.contracts.disk.journal import FALLBACKS
from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.states import AttemptState
from holdfast.workers.decisions.attempt_limit import may_try_again
from holdfast.workers.decisions.exclusions import Capacity, Rooms, exclude_for
from holdfast.workers.schedulers.base import AskCapacity

# Slurm's forecasts of a job that was just submitted are not worth much.
FORECAST_AFTER_S = 60.0
_QUEUED = frozenset({AttemptState.SUBMITTED, AttemptState.PENDING})


def place_of(last: AttemptView | None) -> int:
    """Return the place of an attempt: 0 for the first choice, n for the n-th fallback."""
    return last.request.place if last is not None and last.request is not None else 0


def place_after(history: RunHistory, capacity: Capacity | Rooms, *, now: float) -> int:
    """Return the place of the next attempt: the first choice, unless it is known to be full."""
    spec, place = history.spec, place_of(history.last_asked)
    if not 0 < place <= len(spec.resources.fallbacks):
        return 0
    # Waiting for the first choice would cost more than the difference in price, see decision 68.
    rooms = capacity if isinstance(capacity, Rooms) else Rooms(capacity)
    exclude = exclude_for(history, rooms, place=0, gpus=spec.gpus_min, now=now)
    free = rooms.free(0, exclude)
    return place if free is not None and free < spec.gpus_min else 0


def is_queued(view: AttemptView) -> bool:
    """Return True if the attempt's job waits, as far as the journal knows."""
    return view.state in _QUEUED and view.submitted_at is not None and view.started_at is None


def waited_s(view: AttemptView, now: float) -> float:
    """Return for how long a queued job has waited. A clock that was set back gives 0."""
    return max(0.0, now - (view.submitted_at or now))


def reason_to_move(history: RunHistory, *, now: float) -> str:
    """Return why a pending attempt should go to the next place, or '' if it should not."""
    last, resources = history.last_attempt, history.spec.resources
    following = resources.next_place(place_of(last))
    if last is None or following is None or history.pending_request is not None:
        return ""
    if not is_queued(last) or not may_try_again(history):
        return ""
    queued_s, limit_s = waited_s(last, now), 60 * resources.fallbacks[following - 1].after_min
    if queued_s >= limit_s:
        return f"attempt {last.number} was pending for {queued_s / 60:.0f} min"
    starts_at = last.pending.data.get("starts_at") if last.pending else None
    if starts_at is None or queued_s < FORECAST_AFTER_S or starts_at - now <= limit_s - queued_s:
        return ""
    return (
        f"Slurm expects attempt {last.number} to wait for {(starts_at - now) / 60:.0f} min more, "
        f"and {limit_s / 60:.0f} min are allowed"
    )


@dataclass
class ReturnWatch:
    """Notices that the first choice has had enough free GPUs since a time, while `attempt` lived.

    Times are Unix seconds.
    """

    free_since: float | None = None
    attempt: int = 0

    def look(self, history: RunHistory, ask: AskCapacity, *, now: float) -> str:
        """Return why the run should continue at the first choice now, or ''.

        `ask` returns the free GPUs there. The attempt runs or waits elsewhere.
        """
        last, resources = history.last_attempt, history.spec.resources
        if last is None or last.number != self.attempt:
            # A time that was measured for an earlier attempt says nothing about the present one.
            self.free_since, self.attempt = None, last.number if last else 0
        is_live = last is not None and (last.state is AttemptState.RUNNING or is_queued(last))
        is_away = is_live and place_of(last) > 0 and may_try_again(history)
        if not is_away or last is None or history.pending_request is not None:
            self.free_since = None
            return ""
        delay_s = 60 * resources.return_after_min
        is_due = self.free_since is not None and now - self.free_since >= delay_s
        free = ask(is_urgent=is_due)
        if free is None or free < last.gpus:
            self.free_since = None
            return ""
        self.free_since = now if self.free_since is None else self.free_since
        if now - self.free_since < delay_s:
            return ""
        self.free_since = None
        return f"the first choice has {free} free GPUs for {delay_s / 60:.3g} min"


def relaunch_request(last: AttemptView, place: int, why: str) -> dict[str, Any]:
    """Return the facts of the journal line that asks for an attempt at another place."""
    # A request like an operator's: it is journaled, ends the attempt with a save, and is followed
    # by a relaunch. So a run never holds two allocations, see decision 68.
    return {
        "action": "relaunch",
        "by": FALLBACKS,
        "gpus": last.gpus,
        "after_attempt": last.number,
        "place": place,
        "reason": why,
    }
