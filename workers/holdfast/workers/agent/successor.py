"""The entry point of a successor's job: wait for an attempt to run, or end without training.

The supervisor decides by `verdict.json`. If it does not decide, for example because it does not
run, node 0 ends the wait by a verdict of its own, so the job cannot be adopted afterwards.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.filesystems import is_there
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths, SuccessorPaths
from holdfast.contracts.records.documents import SuccessorVerdict, read_document, read_outcome
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.states import AttemptState, RunState
from holdfast.workers.agent.main import run_agent
from holdfast.workers.runs.successors import WAIT_S_MAX, decide_on

POLL_S: Final = 1.0
# How often node 0 reads the run, to end early.
LOOK_S: Final = 15.0
# The other nodes wait for the verdict of node 0.
MEMBER_EXTRA_S: Final = 60.0


def run_successor(request_path: str) -> str:
    """Run this node's part of the attempt that the successor becomes.

    Returns a description of how it ended, for the job's log.
    """
    paths = SuccessorPaths(Path(request_path).parent)
    is_lead = os.environ.get("SLURM_PROCID", "0") == "0"
    number = wait_for_verdict(paths, is_lead=is_lead)
    if not number:
        return f"successor {paths.number} ended without training"
    return run_agent(str(paths.run.attempt(number).request))


def wait_for_verdict(paths: SuccessorPaths, *, is_lead: bool) -> int:
    """Return the attempt that this job runs; 0 if it runs none."""
    verdict = await_verdict(paths, is_lead=is_lead)
    return 0 if verdict is None else verdict.attempt


def await_verdict(paths: AttemptPaths, *, is_lead: bool) -> SuccessorVerdict | None:
    """Return the verdict about this job; None on another node than node 0 if none comes."""
    began = looked_at = time.monotonic()
    while True:
        verdict = (
            read_document(SuccessorVerdict, paths.verdict) if is_there(paths.verdict) else None
        )
        if verdict is not None:
            return verdict
        now = time.monotonic()
        if not is_lead and now - began > WAIT_S_MAX + MEMBER_EXTRA_S:
            return None
        if is_lead and now - began > WAIT_S_MAX:
            reason = f"no supervisor took it within {WAIT_S_MAX:.0f} s"
            return decide_on(paths, 0, reason)
        if is_lead and (looked_at == began or now - looked_at >= LOOK_S):
            looked_at = now
            if reason := why_over(paths.run):
                return decide_on(paths, 0, reason)
        time.sleep(POLL_S)


def why_over(run: RunPaths) -> str:
    """Return why no attempt of the run can follow, or ''."""
    history = load_tallied(run)
    if not history.state.is_live or history.state is RunState.PAUSED:
        return f"the run is {history.state}"
    last = history.last_attempt
    outcome = read_outcome(run.attempt(last.number)) if last is not None else None
    if outcome is not None and outcome.state is AttemptState.COMPLETED:
        return "the run is completed"
    return ""


if __name__ == "__main__":
    print(run_successor(sys.argv[1]))
