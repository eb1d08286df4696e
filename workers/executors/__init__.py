"""Where jobs run: one interface, one module per scheduler."""

from __future__ import annotations

from holdfast.contracts.errors import SpecError
from holdfast.workers.executors.base import Executor, JobStatus
from holdfast.workers.executors.local import LocalExecutor
from holdfast.workers.executors.slurm import SlurmExecutor

__all__ = ["Executor", "JobStatus", "executor_for"]

_KINDS: dict[str, type[Executor]] = {"local": LocalExecutor, "slurm": SlurmExecutor}


def executor_for(kind: str) -> Executor:
    """The executor called `kind`. Raises `SpecError` with the whole list for any other word."""
    try:
        return _KINDS[kind]()
    except KeyError:
        raise SpecError(f"executor {kind!r}: expected one of {', '.join(_KINDS)}") from None
