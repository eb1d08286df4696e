"""Slurm's own texts about one job, for people who read a report and not for decisions."""

from __future__ import annotations

from typing import Final

from holdfast.workers.schedulers.slurm_client import Ask, call, checked_id, format_time

DAY_S: Final = 24 * 3600.0
# All of them exist since Slurm 20.11. Those with a time say when the job waited and for how long.
ACCOUNTED: Final = (
    *("JobID", "JobName", "Account", "Partition", "QOS", "State", "ExitCode", "DerivedExitCode"),
    *("Submit", "Eligible", "Start", "End", "Elapsed", "Timelimit", "NNodes", "NodeList"),
    *("ReqTRES", "AllocTRES", "MaxRSS", "MaxVMSize"),
)


def controller_text(job_id: str, ask: Ask = call) -> str:
    """Return what `scontrol show job` prints. Raises like `slurm_client.call`."""
    return ask(["scontrol", "--all", "show", "job", checked_id(job_id)])


def accounting_text(job_id: str, submitted_at: float, ask: Ask = call) -> str:
    """Return what `sacct` prints of a job and its steps. Raises like `slurm_client.call`."""
    # sacct finds no job before its start, and the clock that wrote the time may have been ahead.
    start = format_time(max(submitted_at - DAY_S, 0.0))
    fields = ",".join(ACCOUNTED)
    return ask(["sacct", "-P", "-D", f"-S{start}", f"--jobs={checked_id(job_id)}", "-o", fields])
