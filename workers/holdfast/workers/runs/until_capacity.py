"""Runs that are paused until capacity returns: which of them can continue now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.visits import own_runs, visit
from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.states import RunState
from holdfast.workers.decisions.exclusions import Rooms, exclude_for
from holdfast.workers.decisions.sizes import nearest_fitting
from holdfast.workers.runs.feasibility import Feasibility
from holdfast.workers.schedulers import executor_for

# The reason of a request to pause until then, in the journal and in `holdfast show`.
UNTIL_CAPACITY: Final = "until capacity returns"


def ready_runs(root: Path) -> list[RunPaths]:
    """Return this user's waiting runs under `root` that fit on free GPUs, oldest request first.

    A run that cannot be read is skipped. While the scheduler does not answer, its runs stay paused.
    Raises `SchedulerError` if no run can continue and the GPUs of some could not be counted.
    """
    waiting = []
    for one in visit(own_runs(root), load_tallied):
        history = one.result
        if history is None:
            continue
        if waits_for_capacity(history):
            waiting.append((_asked_at(history), one.paths.name, history))
    ready, taken = [], 0
    silent: dict[str, SchedulerError] = {}
    for _, _, history in sorted(waiting, key=lambda one: one[:2]):
        kind, gpus = history.spec.resources.executor, _gpus(history)
        if kind in silent:
            # The scheduler was silent a moment ago. A second question would wait for its time limit
            # again.
            continue
        try:
            free = _free(history, gpus)
        except SchedulerError as error:
            silent[kind] = error
            continue
        # Runs may want the same GPUs, so those that were given to one count for all others.
        if free is None or free - taken >= gpus:
            ready.append(history.paths)
            taken += gpus
    if silent and not ready:
        raise next(iter(silent.values()))
    return ready


def waits_for_capacity(history: RunHistory) -> bool:
    """Return True if the run is paused until capacity returns."""
    asked = history.pending_request or {}
    return history.state is RunState.PAUSED and asked.get("reason") == UNTIL_CAPACITY


def _free(history: RunHistory, gpus: int) -> int | None:
    """Return the GPUs that the run's next attempt could have now; None if nothing limits them."""
    resources = history.spec.resources
    room = executor_for(resources.executor).room(resources)
    if room is not None and room.problem:
        raise SchedulerUnavailableError(room.problem)
    rooms = Rooms(lambda _: room)
    exclude = exclude_for(history, rooms, place=0, gpus=gpus, now=time.time())
    return rooms.free(0, exclude)


def _gpus(history: RunHistory) -> int:
    """Return the GPUs that the run continues with."""
    last = history.last_attempt
    wanted = (last.gpus if last else 0) or history.spec.gpus
    return nearest_fitting(history.spec, wanted, Feasibility.of(history).allows)


def _asked_at(history: RunHistory) -> float:
    return max(e.time for e in history.events if e.kind is EventKind.OPERATOR_REQUEST)
