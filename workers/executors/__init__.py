"""Executors, which run jobs: one interface, and one module for each kind."""

from __future__ import annotations

from holdfast.contracts.errors import SpecError
from holdfast.workers.executors.base import Executor, JobStatus
from holdfast.workers.executors.local import LocalExecutor
from holdfast.workers.executors.slurm import SlurmExecutor

__all__ = ["Executor", "JobStatus", "executor_for"]

_KINDS: dict[str, type[Executor]] = {"local": LocalExecutor, "slurm": SlurmExecutor}


def executor_for(kind: str) -> Executor:
    """Return the executor called `kind`. Raises `SpecError` with the list of kinds if unknown."""
    try:
        return _KINDS[kind]()
    except KeyError:
        raise SpecError(f"executor {kind!r}: expected one of {', '.join(_KINDS)}") from None
