"""The mapping of Slurm's job states to attempt states."""

from __future__ import annotations

from typing import Final

from holdfast.contracts.states import AttemptState

_S = AttemptState
# Every job state and flag that squeue, sacct or scontrol prints, from Slurm 20.11 to 25.05.
SLURM_STATES: Final[dict[str, AttemptState]] = {
    "BOOT_FAIL": _S.NODE_FAILED,
    "CANCELLED": _S.CANCELLED,
    "COMPLETED": _S.COMPLETED,
    "COMPLETING": _S.STOPPING,
    "CONFIGURING": _S.PENDING,
    "DEADLINE": _S.TIMED_OUT,
    "EXPEDITING": _S.PENDING,
    "FAILED": _S.FAILED,
    "LAUNCH_FAILED": _S.FAILED,
    "NODE_FAIL": _S.NODE_FAILED,
    "OUT_OF_MEMORY": _S.FAILED,
    "PENDING": _S.PENDING,
    "POWER_UP_NODE": _S.PENDING,
    "PREEMPTED": _S.PREEMPTED,
    "RECONFIG_FAIL": _S.FAILED,
    "REQUEUED": _S.PENDING,
    "REQUEUE_FED": _S.PENDING,
    "REQUEUE_HOLD": _S.PENDING,
    "RESIZING": _S.RUNNING,
    "RESV_DEL_HOLD": _S.PENDING,
    "REVOKED": _S.LOST,
    "RUNNING": _S.RUNNING,
    "SIGNALING": _S.RUNNING,
    "SPECIAL_EXIT": _S.PENDING,
    "STAGE_OUT": _S.STOPPING,
    "STOPPED": _S.RUNNING,
    "SUSPENDED": _S.RUNNING,
    "TIMEOUT": _S.TIMED_OUT,
    "UPDATE_DB": _S.STOPPING,
}


def translate(state: str) -> AttemptState | None:
    """Return the attempt state for a Slurm state, or None for a state of no known version.

    Slurm may add to its states: `CANCELLED by 1000`, `NODE_FAIL+`, a trailing `*` for flags.
    """
    base = bare_state(state)
    return SLURM_STATES.get(base)


def bare_state(state: str) -> str:
    """Return Slurm's state without additions: `CANCELLED by 0` is `CANCELLED`."""
    return state.split(" ")[0].split(",")[0].rstrip("+*") if state else ""
