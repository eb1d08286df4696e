"""Jobs that Slurm restarts after a node failure: `--requeue=expedite` of Slurm 25.11 and later.

A restarted job keeps its id and name. `Restarts` counts its starts after the first one, so an
attempt knows by that number which of them is its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from holdfast.contracts.states import AttemptState
from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers.base import JobStart, JobStatus
from holdfast.workers.schedulers.slurm_client import JobLine, bare_state, translate

FIRST_VERSION: Final = (25, 11)
SETTING: Final = "enable_expedited_requeue"
# In place of a final state that the accounting does not show.
REQUEUED: Final = "REQUEUED"
# Slurm holds the restart of a job that failed while all its nodes were healthy.
_HELD: Final = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})


def problem_with_cluster(settings: Mapping[str, str]) -> str:
    """Return why a cluster with these settings restarts no job ahead of others, or ''."""
    version = settings.get("SLURM_VERSION", "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < FIRST_VERSION:
        return f"Slurm {version or '(unknown version)'} has no expedited requeue; 25.11 added it"
    if SETTING not in settings.get("SlurmctldParameters", "").split(","):
        return f"this cluster does not allow expedited requeue (SlurmctldParameters={SETTING})"
    return ""


def restarts_of(fields: Mapping[str, str] | None) -> int:
    """Return how often Slurm has restarted a job, from the fields that `scontrol` shows."""
    text = (fields or {}).get("Restarts", "")
    return int(text) if text.isdecimal() else 0


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has restarted the job of a process with these variables."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def start_of(line: JobLine) -> JobStart:
    """Return the newest start of a job."""
    state = bare_state(line.state)
    is_ending = state == "COMPLETING"
    return JobStart(
        restarts=restarts_of(line.fields),
        state=translate(line.state),
        is_ending=is_ending,
        is_held=state in _HELD or line.reason.startswith(("JobHeld", "job_requeued_in_held")),
        nodes=() if is_ending else slurm_client.expand_hosts(line.nodes),
        raw=state,
    )


def status_before(
    status: JobStatus, restarts: int, start: JobStart, recorded: Sequence[JobLine]
) -> JobStatus:
    """Return the status of start number `restarts` of a job that Slurm has restarted since.

    `status` is that of the newest start, and `recorded` what the accounting has of the job.
    """
    said = f"Slurm: the job was restarted (Restarts={start.restarts})"
    if start.is_ending and start.restarts == restarts + 1:
        # The nodes of the earlier start are not free yet.
        detail = "Slurm ends the job's processes and restarts it"
        return replace(
            status, state=AttemptState.STOPPING, detail=detail, evidence=(said,), starts_at=None
        )
    found = recorded[restarts] if len(recorded) > start.restarts else None
    state = translate(found.state) if found is not None else None
    if found is None or state is None or not state.is_terminal:
        return JobStatus(state=AttemptState.LOST, raw=REQUEUED, detail=said, evidence=(said,))
    return JobStatus(
        state=state,
        raw=bare_state(found.state),
        detail=found.state,
        nodes=slurm_client.expand_hosts(found.nodes),
        started_at=found.started_at,
        ended_at=found.ended_at,
        evidence=(f"Slurm: job {found.job_id} is {found.state}", said),
    )
