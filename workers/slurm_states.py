"""Slurm's words for where a job stands, each translated once."""

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


def translate(word: str) -> AttemptState | None:
    """The attempt state behind Slurm's `word`, or None for a word of no known version.

    Slurm adds to its words: `CANCELLED by 1000`, `NODE_FAIL+`, a trailing `*` for flags.
    """
    base = bare_word(word)
    return SLURM_STATES.get(base)


def bare_word(word: str) -> str:
    """Slurm's word without what it adds: `CANCELLED by 0` is `CANCELLED`."""
    return word.split(" ")[0].split(",")[0].rstrip("+*") if word else ""
