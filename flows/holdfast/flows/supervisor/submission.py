"""The submission of a run's next attempt, from its state on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from holdfast.contracts.disk.journal import JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.states import Cause
from holdfast.workers.decisions.policy import spent_on
from holdfast.workers.runs.attempts import submit_attempt

JOURNAL: Final = "flow"


class Companion(Protocol):
    """Another view of the run, such as a flow run of Prefect."""

    def look(self, history: RunHistory) -> bool:
        """Take a newer history; return whether to leave the run, which is paused. Never waits."""


class Submit(Protocol):
    """Submits the next attempt of the run at `paths`. The flow uses a Prefect task."""

    def __call__(
        self,
        paths: RunPaths,
        *,
        gpus: int,
        reason: str,
        exclude: Sequence[str],
        place: int,
        seen: int | None,
    ) -> AttemptPaths: ...


def submit_next(
    paths: RunPaths,
    *,
    gpus: int,
    reason: str,
    exclude: Sequence[str],
    place: int = 0,
    seen: int | None = None,
) -> AttemptPaths:
    """Submit the next attempt from the run's state on disk, and journal it.

    Raises like `workers.attempts.submit_attempt`, for an order after `seen` too.
    """
    history = load_tallied(paths)
    with JournalWriter(paths.journal_of(JOURNAL)) as journal:
        return submit_attempt(
            paths,
            history.spec,
            history.record,
            gpus=gpus,
            reason=reason,
            exclude=exclude,
            place=place,
            hangs_before=spent_on(history, Cause.HANG),
            journal=journal,
            seen=seen,
        )
