"""Decide why an attempt ended, from the records of the agent, the scheduler and operators.

An exit code alone decides nothing: torchrun exits non-zero after a clean preemption.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.records.documents import Outcome, StopFile
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.evidence import (
    HELPER_LOST,
    KILLED_WORKER,
    find_before_traceback,
    find_cause,
    find_in_helper,
    is_of_command,
    last_message,
)
from holdfast.workers.nodes.setup_lines import problem_in
from holdfast.workers.schedulers.base import FORGOTTEN, GONE, REBOOTED, JobStatus
from holdfast.workers.schedulers.slurm_client import is_refusal, may_pass

_S = AttemptState
EVIDENCE_MAX: Final = 20
LINE_CHARACTERS_MAX: Final = 500

# The state of an attempt that ended early, by cause.
STATE_OF_CAUSE: Final[dict[Cause, AttemptState]] = {
    Cause.PREEMPTION: _S.PREEMPTED,
    Cause.TIME_LIMIT: _S.TIMED_OUT,
    Cause.NODE_FAILURE: _S.NODE_FAILED,
    Cause.HANG: _S.HUNG,
    Cause.HOST_OOM: _S.FAILED,
    Cause.GPU_OOM: _S.FAILED,
    Cause.STORAGE_FULL: _S.FAILED,
    Cause.NUMERICS: _S.FAILED,
    Cause.USER_ERROR: _S.FAILED,
    Cause.INFRASTRUCTURE: _S.FAILED,
    Cause.OPERATOR: _S.CANCELLED,
    Cause.UNKNOWN: _S.FAILED,
}

# Final states that give the cause without further evidence.
_OF_SCHEDULER: Final[dict[str, Cause]] = {
    "PREEMPTED": Cause.PREEMPTION,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "OUT_OF_MEMORY": Cause.HOST_OOM,
    # A job that Slurm calls CANCELLED was cancelled by a person: Holdfast's own cancellations leave
    # an outcome or a journal line, which come first.
    "CANCELLED": Cause.OPERATOR,
    FORGOTTEN: Cause.INFRASTRUCTURE,
    "LAUNCH_FAILED": Cause.INFRASTRUCTURE,
    "RECONFIG_FAIL": Cause.INFRASTRUCTURE,
}

# Causes that the agent can only guess, so the scheduler's state may replace them.
_GUESSES: Final = frozenset({Cause.INFRASTRUCTURE, Cause.UNKNOWN})
_PREEMPT_TIME: Final = re.compile(r"PreemptTime=\d")

# Other processes send these signals. Any other signal comes from the process itself or the kernel.
_FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)
# A process that ends by one of these signals usually printed why.
_EXPLAINED_SIGNALS: Final = frozenset({signal.SIGABRT, signal.SIGBUS})
# Lines of torchrun's log or the job's log when the program could not be started.
_NOT_STARTED: Final = re.compile(
    r"^\S*: error: |No module named|execve\(\): .*(No such file|Permission denied)"
    r"|(command )?not found$|can't (open|find) |^ModuleNotFoundError|cannot execute",
    re.M,
)
_OF_SLURM: Final = re.compile(r"(srun|slurmstepd\S*): ")
# Slurm's own lines that blame the job's options, program or container. Its other errors concern
# nodes, the network and tasks that have ended.
_REFUSED_BY_SLURM: Final = re.compile(
    r"^srun: (unrecognized|invalid|ambiguous) option|^srun: option '"
    r"|: (error|fatal): .*(--[a-z]|not a valid|plugin|multi_prog|execve\(\)|pyxis:)"
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The state, cause and evidence of an attempt that ended."""

    state: AttemptState
    cause: Cause | None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """How one rank ended, from torchrun's report and error file. `timestamp` is Unix seconds."""

    rank: int
    exit_code: int
    timestamp: float = 0.0
    traceback: str = ""
    pid: int = 0
    stderr_tail: str = ""
    host: str = ""

    @property
    def signal(self) -> int:
        """The signal that killed the rank, or 0."""
        return -self.exit_code if self.exit_code < 0 else 0

    @property
    def text(self) -> str:
        """The rank's traceback, or the end of its standard error if it has none."""
        return self.traceback or self.stderr_tail


@dataclass(frozen=True, kw_only=True)
class SaveFailure:
    """A save of a launch that failed, as the flusher recorded it."""

    step: int
    error: str

    def __str__(self) -> str:
        return f"the save of step {self.step} failed: {self.error}"


def classify(
    *,
    outcome: Outcome | None,
    status: JobStatus | None,
    signals: Sequence[dict[str, Any]] = (),
    stop: StopFile | None = None,
    claimed: bool = False,
    lost_hosts: Sequence[str] = (),
    job_log: str = "",
) -> Ending:
    """Return how an attempt ended.

    `signals` holds the data of the attempt's `signal` journal lines, oldest first. `status` is
    None if the scheduler did not answer. `lost_hosts` are the hosts that the surviving agents
    reported lost. `job_log` is the end of the job's output from before its agent began.
    """
    # The agent saw the ranks end. The scheduler knows the job only.
    if outcome is not None:
        return _with_outcome(outcome, status)
    reported = list(status.evidence) if status else []
    # An operator's order explains whatever the processes reported while they ended.
    if stop is not None:
        message = f"{stop.by} requested {stop.action}"
        return _ending(Cause.OPERATOR, [message, *reported])
    signalled = next((s for s in reversed(signals) if s.get("cause")), None)
    # A dying node's step sends SIGHUP to its processes, so with a lost node the signal is an
    # effect.
    if signalled is not None and lost_hosts and _is_hang_up(signalled):
        signalled = None
    raw = status.raw if status else ""
    # The agent saw signs of a preemption. Slurm may later call the same job cancelled.
    if signalled is not None and raw not in {"PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}:
        return _ending(Cause(signalled["cause"]), [_of_signal(signalled), *reported])
    if lost_hosts:
        # The surviving agents then end the job themselves, which Slurm reports as cancelled.
        return _ending(
            Cause.NODE_FAILURE, [f"{h}: its agent is lost" for h in lost_hosts] + reported
        )
    if raw in _OF_SCHEDULER:
        return _ending(_OF_SCHEDULER[raw], reported)
    if claimed:
        return _ending(*_without_outcome(raw, reported), state=_S.LOST)
    if problem := problem_in(job_log):
        return _ending(Cause.USER_ERROR, [*problem, *reported])
    never = "the job ended before its agent started; see the attempt's logs"
    if found := _not_started(job_log):
        return _ending(Cause.USER_ERROR, [found, never, *reported])
    return _ending(Cause.INFRASTRUCTURE, [never, *reported], state=_S.LOST)


def _without_outcome(raw: str, reported: Sequence[str]) -> tuple[Cause, list[str]]:
    """Return the cause and evidence of an attempt whose agent started and left no outcome.

    An agent always writes an outcome unless it is killed. If its processes are known to be gone,
    it was killed. Otherwise the cause is unknown.
    """
    no_outcome = "the job is gone; its agent recorded no outcome"
    if raw == REBOOTED:
        return Cause.NODE_FAILURE, [no_outcome, *reported]
    if raw == GONE:
        killed = "its agent was killed: no recorded outcome; host up"
        return Cause.INFRASTRUCTURE, [killed, *reported]
    return Cause.UNKNOWN, [no_outcome, *reported]


def hung_ending(evidence: Sequence[str]) -> Ending:
    """Return the ending of a launch whose ranks hung. `evidence` is the proof of the hang."""
    return _ending(Cause.HANG, evidence)


def with_numerics_stop(ending: Ending, stopped_for: str) -> Ending:
    """Return `ending`, with cause `numerics` if the ranks had stopped for a bad loss.

    `stopped_for` is that reason, or empty. Ranks that hang or are killed while they stop still
    ended because of the loss. A node that was lost meanwhile keeps its own cause.
    """
    if not stopped_for or ending.cause in {Cause.NUMERICS, Cause.NODE_FAILURE}:
        return ending
    return _ending(Cause.NUMERICS, [stopped_for, *ending.evidence])


@dataclass(frozen=True, kw_only=True)
class UnhealthyNode:
    """A node on which the health check `check` failed, and why."""

    host: str
    check: str
    problem: str


def unhealthy_ending(
    unhealthy: Sequence[UnhealthyNode], nodes: int
) -> tuple[Ending, tuple[str, ...]]:
    """Return how an attempt of `nodes` nodes ends because of health checks, and the bad hosts.

    If the same check fails on all of several nodes, the check is wrong and not the nodes.
    """
    evidence = [f"{one.host} is unhealthy: {one.check}: {one.problem}" for one in unhealthy]
    is_same = len({one.check for one in unhealthy}) == 1
    # On one node the same result proves nothing about the check, so `nodes` must be more than one.
    # See decision 50.
    if is_same and len(unhealthy) == nodes > 1:
        what = (
            f"the health check {unhealthy[0].check!r} failed on all {nodes} nodes, so no node is "
            "excluded; correct the check in the spec"
        )
        return _ending(Cause.USER_ERROR, [what, *evidence]), ()
    return _ending(Cause.NODE_FAILURE, evidence), tuple(one.host for one in unhealthy)


def _is_hang_up(event: dict[str, Any]) -> bool:
    """Return True for a SIGHUP without a sign of preemption from the scheduler.

    The processes of a dying node's job step get this signal. No scheduler uses it for preemption.
    """
    marked = _PREEMPT_TIME.search(str(event.get("detail", "")))
    return event.get("name") == "SIGHUP" and not marked


def classify_crash(
    failures: Sequence[RankFailure],
    *,
    oom_kills: int = 0,
    lost_nodes: Sequence[str] = (),
    launch_log: str = "",
    unsaved: str = "",
) -> tuple[Ending, RankFailure | None]:
    """Return how a launch crashed, and the rank that failed first (None if no rank is known).

    `oom_kills` is the number of the kernel's out-of-memory kills during the launch. `launch_log`
    is the end of torchrun's own log. `unsaved` is the recorded error of a save after which nothing
    was trained, see `Ended.unsaved`. It decides before any text.
    """
    # The other ranks' errors only report the lost peer.
    if lost_nodes:
        return _ending(Cause.NODE_FAILURE, [f"node {n} was lost" for n in lost_nodes]), None
    first = first_failure(failures)
    # A rank that was killed had no time to write a record. Its peers' records are secondary, see
    # decision 19.
    if first is not None and first.signal:
        return _of_killed(first, oom_kills), first
    # A full disk leaves no room for a traceback, so the save's own error decides, see decision 92.
    if (found := find_cause(unsaved)) and not oom_kills:
        said = last_message(first.text) if first else ""
        more = [f"rank {first.rank}: {said}"] if first and said else []
        return _ending(found.rule.cause, [unsaved, *more]), first
    if first is None:
        return _of_launch(launch_log, oom_kills), None
    who = f"rank {first.rank} ended with exit code {first.exit_code}"
    found = find_cause(first.text)
    if found is None and is_of_command(first.text):
        return _of_command(first, who), first
    if found is None:
        # Nothing but the program chooses other exit codes.
        message = last_message(first.text) or "it exited without an error message"
        if helper := find_in_helper(first.stderr_tail):
            evidence = [f"{who}: {message}", f"its helper process before that: {helper.quote}"]
            return _ending(helper.rule.cause, evidence), first
        return _ending(Cause.USER_ERROR, [f"{who}: {message}"]), first
    if oom_kills and (found.rule is HELPER_LOST or KILLED_WORKER.search(found.quote)):
        return _ending(Cause.HOST_OOM, [f"{who}: {found.quote}", _of_kernel(oom_kills)]), first
    return _ending(found.rule.cause, [f"{who}: {found.quote}"]), first


def _of_command(first: RankFailure, who: str) -> Ending:
    """Return how a rank ended that failed because a command that it ran had failed."""
    message = f"{who}: {last_message(first.text)}"
    found = find_before_traceback(first.stderr_tail)
    if found is None:
        return _ending(Cause.UNKNOWN, [message])
    return _ending(found.rule.cause, [message, f"before that: {found.quote}"])


def _of_killed(first: RankFailure, oom_kills: int) -> Ending:
    """Return how a rank ended that was killed by a signal."""
    name = _signal_name(first.signal)
    who = f"rank {first.rank} was killed by signal {first.signal} ({name})"
    if first.signal == signal.SIGKILL and oom_kills:
        return _ending(Cause.HOST_OOM, [who, _of_kernel(oom_kills)])
    if first.signal in _FROM_OUTSIDE:
        return _ending(Cause.INFRASTRUCTURE, [who, "the kernel reports no out-of-memory kill"])
    if first.signal in _EXPLAINED_SIGNALS and (found := find_cause(first.text)):
        return _ending(found.rule.cause, [f"{who}: {found.quote}"])
    message = last_message(first.text)
    return _ending(Cause.UNKNOWN, [f"{who}: {message}" if message else who])


def _of_launch(log: str, oom_kills: int) -> Ending:
    """Return how torchrun ended when it named no failed rank."""
    if oom_kills:
        return _ending(Cause.HOST_OOM, ["torchrun ended", _of_kernel(oom_kills)])
    message = last_message(log)
    if found := _not_started(log):
        return _ending(Cause.USER_ERROR, [f"torchrun: {found}"])
    if named := find_cause(log):
        return _ending(named.rule.cause, [f"torchrun: {named.quote}"])
    detail = f": {message}" if message else "; its log is empty"
    return _ending(Cause.INFRASTRUCTURE, [f"torchrun failed without naming a rank{detail}"])


def _not_started(log: str) -> str:
    """Return the log line which says that the program could not be started, or ''."""
    lines = [line.strip() for line in log.splitlines()]
    return next((line for line in reversed(lines) if _says_not_started(line)), "")


def _says_not_started(line: str) -> bool:
    if not _OF_SLURM.match(line):
        return _NOT_STARTED.search(line) is not None
    is_final = _REFUSED_BY_SLURM.search(line) is not None or not may_pass(line)
    return is_final and is_refusal(line)


def _of_kernel(oom_kills: int) -> str:
    return f"kernel: oom_kill +{oom_kills}: it killed processes because memory ran out"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure that came first. A killed rank precedes its peers' secondary errors."""
    return min(failures, key=_precedence, default=None)


def _precedence(failure: RankFailure) -> tuple[bool, bool, bool, bool, bool, float, int]:
    """Return a sort key: the smallest is the first failure. SIGABRT may be a secondary error."""
    is_killed = failure.signal not in {0, signal.SIGABRT}
    found = None if is_killed else find_cause(failure.text)
    is_secondary = found is not None and found.rule.secondary_error
    # Among secondary errors, a timeout explains the connections that the other ranks lost.
    gave_up = found is not None and found.rule.cause is Cause.HANG
    silent = not failure.text
    return (
        is_secondary,
        is_secondary and not gave_up,
        not is_killed,
        silent,
        not failure.traceback,
        failure.timestamp,
        failure.rank,
    )


def _with_outcome(outcome: Outcome, status: JobStatus | None) -> Ending:
    """Return the agent's outcome, corrected where only the scheduler can know the cause."""
    evidence = [*outcome.evidence, *(status.evidence if status and gives_reason(status) else ())]
    # The scheduler cannot know better than an agent that saw all ranks exit with status 0.
    if outcome.state is _S.COMPLETED:
        return Ending(state=_S.COMPLETED, cause=None, evidence=_cut(evidence))
    scheduler_cause = _OF_SCHEDULER.get(status.raw) if status else None
    if scheduler_cause is not None and _may_correct(outcome, scheduler_cause):
        return _ending(scheduler_cause, evidence)
    return Ending(state=outcome.state, cause=outcome.cause, evidence=_cut(evidence))


def _may_correct(outcome: Outcome, scheduler_cause: Cause) -> bool:
    """Return True if the scheduler's cause is more reliable than the agent's."""
    if scheduler_cause is Cause.OPERATOR and outcome.state is _S.FAILED:
        # It had crashed before anyone could cancel it.
        return False
    return outcome.cause in _GUESSES or (was_signalled(outcome) and not is_certain(outcome))


def was_signalled(outcome: Outcome) -> bool:
    """Return True if the agent stopped because of a signal, so its cause is a judgement."""
    return any(line.startswith("signal:") for line in outcome.evidence)


def is_certain(outcome: Outcome) -> bool:
    """Return True if the agent saw the scheduler preempt the job, or its cause is not guess."""
    if any(_PREEMPT_TIME.search(line) for line in outcome.evidence):
        return True
    return not was_signalled(outcome) and outcome.cause not in _GUESSES


def gives_reason(status: JobStatus) -> bool:
    """Return True if the scheduler reports a reason for the end, not only the end."""
    return status.has_ended and status.raw in _OF_SCHEDULER


def _ending(cause: Cause, evidence: Sequence[str], state: AttemptState | None = None) -> Ending:
    return Ending(state=state or STATE_OF_CAUSE[cause], cause=cause, evidence=_cut(evidence))


def _cut(evidence: Sequence[str]) -> tuple[str, ...]:
    return tuple(line[:LINE_CHARACTERS_MAX] for line in dict.fromkeys(evidence))[:EVIDENCE_MAX]


def _of_signal(data: dict[str, Any]) -> str:
    detail = f": {data['detail']}" if data.get("detail") else ""
    return (
        f"the agent received {data.get('name', 'a signal')} from {data.get('source', '?')}{detail}"
    )
