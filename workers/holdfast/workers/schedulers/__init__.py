"""Executors, which run jobs: one interface, and one module for each kind.

A module belongs here if it asks or commands a scheduler: Slurm, or this machine. It knows jobs and
nodes, and nothing of checkpoints or causes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.contracts.errors import SchedulerUnavailableError, SpecError
from holdfast.contracts.spec.resources import Resources
from holdfast.workers.schedulers.base import AskCapacity, Executor, JobStatus
from holdfast.workers.schedulers.local import LocalExecutor

__all__ = ["Executor", "JobStatus", "ask_capacity", "executor_for"]


def _slurm() -> Executor:
    # Imports submitit, which takes a moment and which only Slurm's jobs need.
    from holdfast.workers.schedulers.slurm import SlurmExecutor

    return SlurmExecutor()


_KINDS: dict[str, Callable[[], Executor]] = {"local": LocalExecutor, "slurm": _slurm}


def executor_for(kind: str) -> Executor:
    """Return the executor called `kind`. Raises `SpecError` with the list of kinds if unknown."""
    try:
        return _KINDS[kind]()
    except KeyError:
        raise SpecError(f"executor {kind!r}: expected one of {', '.join(_KINDS)}") from None


def ask_capacity(
    resources: Resources, held: Mapping[str, int] | None = None, exclude: Sequence[str] = ()
) -> AskCapacity:
    """Return a question about the GPUs free for `resources` without the hosts `exclude`.

    For `held`, see `Executor.room`. Its answer is None if the scheduler does not respond, so that
    a run neither grows nor moves by a guess.
    """
    executor = executor_for(resources.executor)

    def ask(*, is_urgent: bool) -> int | None:
        try:
            return executor.capacity(resources, held, is_urgent=is_urgent, exclude=exclude)
        except SchedulerUnavailableError:
            # The supervisor reports this when it next asks about the job.
            return None

    return ask
