"""Bring the journal up to date with the attempts. Any process may do so at any time.

For each attempt without a known ending, this reads the outcome, the claim and the scheduler. It
journals a change of state, and the ending exactly once. So an attempt gets its final state even
if the flow, Prefect and its worker were killed long before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import reading_run
from holdfast.contracts.records import history_cache, supervision
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.spec.secrets import forget_record


def reconcile(
    paths: RunPaths, *, writer: str = "flow", load: Callable[[], RunHistory] | None = None
) -> RunHistory:
    """Journal what happened to the run's attempts since the last call; return the history.

    `load` returns the history, by default `load_tallied`. If the scheduler does not answer, nothing
    changes. Raises `NotFoundError` if there is no run.
    """
    load = load or partial(history_cache.load_tallied, paths)
    history = load()
    open_attempts = [view for view in history.attempts if not view.state.is_terminal]
    changed = False
    if open_attempts:
        # Takes a tenth of a second to import, and commands list many runs that have ended.
        from holdfast.workers.runs.endings import reconcile_attempt

        with reading_run(paths.directory):
            for view in open_attempts:
                changed |= reconcile_attempt(paths, view, writer, load)
    history = load() if changed else history
    if not history.state.is_live:
        # The supervisor may be dead, and secrets must not stay on disk after the run.
        forget_record(paths, lambda: not needs_secrets(paths, load()))
    return history


def needs_secrets(paths: RunPaths, history: RunHistory) -> bool:
    """Return True if the run is live, or if its supervisor may still start a consumer."""
    if history.state.is_live:
        return True
    return bool(history.spec.on) and supervision.is_supervised(paths.flow_lock) is True
