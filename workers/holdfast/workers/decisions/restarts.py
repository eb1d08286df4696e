"""Decide what becomes of a job that the scheduler may restart. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from holdfast.contracts.states import AttemptState
from holdfast.workers.schedulers.base import JobStart

# For how long an attempt's job may take to end, and the restart of a run that could take other
# nodes may wait for its own, before the next attempt gets another job.
ENDS_S_MAX: Final = 600.0
# Slurm's state of a restart that comes before all other jobs.
EXPEDITING: Final = "EXPEDITING"

# `adopt`: the next attempt runs in it. `wait`: it may still come or start. `withdraw`: no attempt
# runs in it. `gone`: there is none.
Action = Literal["adopt", "wait", "withdraw", "gone"]


@dataclass(frozen=True, kw_only=True)
class RestartPlan:
    """What becomes of a restart, and why."""

    action: Action
    reason: str = ""


def plan_restart(
    start: JobStart | None,
    *,
    restarts: int,
    differ: Sequence[str],
    exclude: Collection[str],
    waited_s: float,
    has_choice: bool,
) -> RestartPlan:
    """Return what becomes of the restart of a job, once the policy wants the next attempt.

    `start` is the job's newest start, and `restarts` the number of the one that ran the attempt,
    which ended `waited_s` seconds ago. The next attempt's job would `differ` in these parameters,
    and must not have the hosts `exclude`. With `has_choice`, it could have another size or place.
    """
    if start is None or (start.state is not None and start.state.is_terminal):
        return RestartPlan(action="gone")
    if differ:
        return RestartPlan(
            action="withdraw",
            reason=f"the next attempt needs another job: {', '.join(differ)} differ",
        )
    if start.is_held:
        return RestartPlan(
            action="withdraw", reason="Slurm holds it: the job failed, and no node of it did"
        )
    if start.restarts <= restarts or start.is_ending:
        if waited_s > ENDS_S_MAX:
            text = f"its job had not ended {ENDS_S_MAX:.0f} s after the attempt"
            return RestartPlan(action="withdraw", reason=text)
        return RestartPlan(action="wait", reason="the job has not ended yet; Slurm may restart it")
    if start.raw == EXPEDITING and has_choice and waited_s > ENDS_S_MAX:
        text = f"it had no nodes {ENDS_S_MAX:.0f} s after the attempt"
        return RestartPlan(action="withdraw", reason=text)
    if start.raw == EXPEDITING:
        return RestartPlan(action="wait", reason="Slurm restarts the job as soon as it has nodes")
    if start.state is not AttemptState.RUNNING:
        return RestartPlan(
            action="withdraw", reason=f"it waits at an ordinary place in the queue ({start.raw})"
        )
    if shared := sorted({*start.nodes} & {*exclude}):
        text = f"it has started on {', '.join(shared)}, which is excluded"
        return RestartPlan(action="withdraw", reason=text)
    return RestartPlan(action="adopt")
