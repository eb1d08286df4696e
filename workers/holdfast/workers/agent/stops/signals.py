"""Signals to the agent. The handler sets a flag, the loop reads it, and pure code judges it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Final

from holdfast.contracts.states import Cause
from holdfast.workers.runs.request import WARNING_EARLY_S
from holdfast.workers.schedulers import slurm_client, slurm_restarts

HEARD: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
# A TERM this close to the end of the job comes from its time limit.
LIMIT_NEAR_S: Final = 5.0
KILL_WAIT_S: Final = 30.0
_OF_STATE: Final = {
    "PREEMPTED": Cause.PREEMPTION,
    "CANCELLED": Cause.OPERATOR,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
}


class SignalBox:
    """Collects signals to this process; the main thread must install it.

    `heard` are the names of those that `wait` has returned.
    """

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def install(self) -> None:
        """Replace every handler by one that only sets a flag."""
        # The interpreter writes the number to the pipe. That is the flag, and it wakes the loop.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in HEARD:
            signal.signal(number, _do_nothing)
        signal.signal(signal.SIGCONT, signal.SIG_IGN)

    def wait(self, timeout_s: float) -> list[str]:
        """Return the names of received signals, in order; wait up to `timeout_s` for the first."""
        with contextlib.suppress(InterruptedError):
            waiter = select.poll()
            waiter.register(self._read, select.POLLIN)
            waiter.poll(timeout_s * 1000)
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._read, 4096)
        names = [signal.Signals(n).name for n in dict.fromkeys(numbers) if n in set(HEARD)]
        self.heard = list(dict.fromkeys([*self.heard, *names]))
        return names

    def wake(self) -> None:
        """End a wait of another thread, which then returns no name."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The meaning of a signal. `cause` is None for a warning of a limit that the agent keeps."""

    cause: Cause | None
    deadline: float
    detail: str


def judge(
    name: str,
    *,
    job: Mapping[str, str] | None,
    on_slurm: bool,
    now: float,
    grace_s: float,
    end_at: float | None,
    warning_s: float,
    restarts: int = 0,
) -> Judgement:
    """Return what signal `name` means at Unix time `now`.

    `job` has Slurm's fields of the job at that time, or None without an answer. `end_at` is when
    the job's time is up. `warning_s` is how long before that USR2 was requested. `restarts` is how
    often Slurm had restarted the job when it began.
    """
    by_grace = now + grace_s
    if job is None:
        return _judge_alone(
            name,
            on_slurm=on_slurm,
            now=now,
            by_grace=by_grace,
            end_at=end_at,
            warning_s=warning_s,
        )
    state = slurm_client.bare_state(job.get("JobState", ""))
    end = slurm_client.parse_time(job.get("EndTime", ""))
    preempted_at = slurm_client.parse_time(job.get("PreemptTime", ""))
    seen = f"JobState={state} EndTime={job.get('EndTime')} PreemptTime={job.get('PreemptTime')}"
    if preempted_at is not None:
        return Judgement(cause=Cause.PREEMPTION, deadline=max(end or by_grace, now), detail=seen)
    cause = _of_state(state, job)
    if slurm_restarts.restarts_of(job) > restarts:
        # Slurm restarts a job because one of its nodes failed, or by an administrator's request.
        cause = Cause.NODE_FAILURE
    if cause is not None:
        deadline = now + min(grace_s, KILL_WAIT_S)
        return Judgement(cause=cause, deadline=deadline, detail=seen)
    left_s = end - now if end is not None else None
    if name in {"SIGUSR2", "SIGUSR1"} and left_s is not None:
        if left_s <= warning_s + WARNING_EARLY_S:
            return Judgement(cause=None, deadline=now + left_s, detail=seen)
    elif left_s is not None and left_s <= LIMIT_NEAR_S:
        return Judgement(cause=Cause.TIME_LIMIT, deadline=now + KILL_WAIT_S, detail=seen)
    if name == "SIGINT":
        return Judgement(cause=Cause.OPERATOR, deadline=by_grace, detail=seen)
    return Judgement(cause=Cause.PREEMPTION, deadline=by_grace, detail=seen)


def _of_state(state: str, job: Mapping[str, str]) -> Cause | None:
    """Return the cause that the job's state implies for a signal, or None while it simply runs.

    `COMPLETING` hides the underlying state. Its reason identifies a time limit. Otherwise an
    operator is assumed to have ended the job, and Slurm's final state corrects that if necessary.
    """
    if state == "COMPLETING":
        return Cause.TIME_LIMIT if job.get("Reason") == "TimeLimit" else Cause.OPERATOR
    return _OF_STATE.get(state)


def _judge_alone(
    name: str,
    *,
    on_slurm: bool,
    now: float,
    by_grace: float,
    end_at: float | None,
    warning_s: float,
) -> Judgement:
    """Return the judgement without the scheduler's answer, by the known end of the job."""
    reason = "Slurm did not answer" if on_slurm else "there is no scheduler"
    is_warning = on_slurm and warning_s > 0 and name in {"SIGUSR2", "SIGUSR1"}
    if is_warning and end_at is not None and end_at - now <= warning_s + WARNING_EARLY_S:
        detail = f"{reason}; the job's time is up in {end_at - now:.0f} s"
        return Judgement(cause=None, deadline=end_at, detail=detail)
    if name == "SIGINT":
        return Judgement(cause=Cause.OPERATOR, deadline=by_grace, detail="interrupted")
    if end_at is not None and end_at - now <= LIMIT_NEAR_S:
        return Judgement(cause=Cause.TIME_LIMIT, deadline=by_grace, detail=reason)
    return Judgement(cause=Cause.PREEMPTION, deadline=by_grace, detail=reason)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor already has the signal's number."""
