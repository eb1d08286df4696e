"""The claim: only one job runs an attempt, and any other job for it ends before it trains."""

from __future__ import annotations

import os
import time
from typing import Final

from holdfast.contracts.disk.filesystems import is_there
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records import documents
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.nodes.processes import name_process

# Rename an outcome of another attempt that is in this attempt's folder.


def quarantine_stale_outcome(attempt: AttemptPaths, journal: JournalWriter) -> None:
    """Rename an outcome of another attempt and journal that, so that it is not taken for ours."""
    try:
        found = documents.read_document(documents.Outcome, attempt.outcome)
    except HoldfastError:
        # Reading the attempt reports a damaged outcome. It must not be moved.
        return
    if found is None or documents.is_of(found, attempt.number):
        return
    aside = attempt.outcome.with_name(f"outcome.of-{found.attempt:04d}.json")
    attempt.outcome.rename(aside)
    text = (
        f"outcome.json belonged to attempt {found.attempt}, not to {attempt.number}; it was "
        f"renamed to {aside.name}"
    )
    journal.append(EventKind.NOTE, attempt=attempt.number, text=text)


CLAIM_WAIT_S: Final = 300.0
POLL_S: Final = 0.2


def claim(context: AgentContext, journal: JournalWriter) -> bool:
    """Claim the attempt for this job; if another job has it, journal that and return False."""
    own = name_process(os.getpid())
    assert own is not None
    document = documents.Claim(
        job_id=context.job_id,
        pid=own.pid,
        process_start_s=own.start_s,
        boot_id=own.boot_id,
        host=context.host,
        claimed_at=time.time(),
    )
    number = context.attempt.number
    quarantine_stale_outcome(context.attempt, journal)
    if context.attempt.outcome.exists() or not documents.create_document(
        context.attempt.claim, document
    ):
        holder = documents.read_claim(context.attempt)
        who = f"job {holder.job_id} on {holder.host}" if holder else "a job that has ended"
        journal.append(
            EventKind.NOTE,
            attempt=number,
            text=f"job {context.job_id} on {context.host} ended before training: attempt {number} "
            f"belongs to {who}",
        )
        return False
    journal.append(
        EventKind.CLAIMED, attempt=number, job_id=context.job_id, host=context.host, pid=own.pid
    )
    return True


def wait_for_claim(context: AgentContext) -> bool:
    """Wait on another node until node 0 has claimed; return True if it did so for this job."""
    give_up = time.monotonic() + CLAIM_WAIT_S
    while time.monotonic() < give_up:
        path = context.attempt.claim
        holder = documents.read_document(documents.Claim, path) if is_there(path) else None
        if holder is not None:
            return holder.job_id == context.job_id
        time.sleep(POLL_S)
    return False
