"""The entry point of a job that Slurm may restart: run its attempt, or the one that a restart got.

The first start runs the attempt that it was submitted for. Each later one waits, as a successor
does, until `verdict.json` of the attempt before it names the attempt and the start that runs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.workers.agent.main import run_agent
from holdfast.workers.agent.successor import await_verdict
from holdfast.workers.schedulers.slurm_restarts import restart_count


def run_restarted(request_path: str) -> str:
    """Run this node's part of the attempt that this start of the job runs.

    Returns a description of how it ended, for the job's log.
    """
    restarts = restart_count(os.environ)
    is_lead = os.environ.get("SLURM_PROCID", "0") == "0"
    attempt = find_attempt(AttemptPaths(Path(request_path).parent), restarts, is_lead=is_lead)
    if attempt is None:
        return f"restart {restarts} of the job ended without training"
    return run_agent(str(attempt.request))


def find_attempt(attempt: AttemptPaths, restarts: int, *, is_lead: bool) -> AttemptPaths | None:
    """Return the attempt of start number `restarts`; None if it runs none.

    `attempt` is the one that the job was submitted for. Each verdict leads to a later attempt.
    """
    own = 0
    while own < restarts:
        verdict = await_verdict(attempt, is_lead=is_lead)
        if verdict is None or not verdict.attempt or verdict.restarts <= own:
            return None
        attempt, own = attempt.run.attempt(verdict.attempt), verdict.restarts
    return attempt if own == restarts else None


if __name__ == "__main__":
    print(run_restarted(sys.argv[1]))
