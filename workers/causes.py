"""Why an attempt ended: a pure reading of records, the scheduler's, the agent's and people's.

Exit codes alone decide nothing: torchrun exits non-zero after a clean preemption.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.attempt import Outcome, StopFile
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.evidence import (
    KILLED_WORKER,
    find_before_traceback,
    find_cause,
    is_of_command,
    last_words,
)
from holdfast.workers.executors.base import GONE, REBOOTED, JobStatus

_S = AttemptState
EVIDENCE_MAX: Final = 20
LINE_CHARACTERS_MAX: Final = 500

# Which state goes with a cause that ended an attempt early.
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

# Slurm's own endings that need nothing else to be believed.
_OF_SCHEDULER: Final[dict[str, Cause]] = {
    "PREEMPTED": Cause.PREEMPTION,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "OUT_OF_MEMORY": Cause.HOST_OOM,
    "CANCELLED": Cause.OPERATOR,
    "LAUNCH_FAILED": Cause.INFRASTRUCTURE,
    "RECONFIG_FAIL": Cause.INFRASTRUCTURE,
}

# What an agent cannot tell apart by itself, and the scheduler's word does.
_GUESSES: Final = frozenset({Cause.INFRASTRUCTURE, Cause.UNKNOWN})
_PREEMPT_TIME: Final = re.compile(r"PreemptTime=\d")

# Nothing but the process itself, and the kernel on its behalf, sends what is not among these.
_FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)
# After these a process's own words say why.
_WITH_WORDS: Final = frozenset({signal.SIGABRT, signal.SIGBUS})
# What torchrun's and the job's own logs say when the program was never started.
_NOT_STARTED: Final = re.compile(
    r"^\S*: error: |No module named|execve\(\): .*(No such file|Permission denied)"
    r"|(command )?not found$|can't (open|find) |^ModuleNotFoundError|cannot execute",
    re.M,
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended, and the records that say so."""

    state: AttemptState
    cause: Cause | None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """One rank's end as torchrun's report and error file tell it. `timestamp` is Unix seconds."""

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
        """Its traceback, else the end of its standard error."""
        return self.traceback or self.stderr_tail


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
    """How an attempt that is over ended.

    `signals` are the data of its `signal` journal lines, oldest first; `status` is None when the
    scheduler did not answer. `lost_hosts` are those that surviving agents found gone,
    `job_log` is the end of what the job wrote before its agent began.
    """
    if outcome is not None:
        return _with_outcome(outcome, status)
    said = list(status.evidence) if status else []
    if stop is not None:
        words = f"{stop.by} asked for {stop.action}"
        return _ending(Cause.OPERATOR, [words, *said])
    heard = next((s for s in reversed(signals) if s.get("cause")), None)
    if heard is not None and lost_hosts and _is_hang_up(heard):
        heard = None
    word = status.raw if status else ""
    # The agent saw a preemption's marks; afterwards Slurm may call the same job cancelled.
    if heard is not None and word not in {"PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}:
        return _ending(Cause(heard["cause"]), [_of_signal(heard), *said])
    if lost_hosts:
        # The survivors then end the job themselves, which Slurm calls cancelled.
        return _ending(Cause.NODE_FAILURE, [f"{h}: its agent is gone" for h in lost_hosts] + said)
    if word in _OF_SCHEDULER:
        return _ending(_OF_SCHEDULER[word], said)
    if claimed:
        return _ending(*_of_silence(word, said), state=_S.LOST)
    never = "the job ended before its agent began; see the attempt's logs"
    if found := _not_started(job_log):
        return _ending(Cause.USER_ERROR, [found, never, *said])
    return _ending(Cause.INFRASTRUCTURE, [never, *said], state=_S.LOST)


def _of_silence(word: str, said: Sequence[str]) -> tuple[Cause, list[str]]:
    """Cause and evidence of an attempt whose agent began and left no outcome.

    An agent writes one however it ends, unless it is killed: where its processes are known to be
    gone, that is what happened. What a scheduler does not say is not guessed.
    """
    silence = "the job is gone and its agent left no outcome"
    if word == REBOOTED:
        return Cause.NODE_FAILURE, [silence, *said]
    if word == GONE:
        killed = "its agent was killed: it left no outcome, and the machine stayed up"
        return Cause.INFRASTRUCTURE, [killed, *said]
    return Cause.UNKNOWN, [silence, *said]


def hung_ending(evidence: Sequence[str]) -> Ending:
    """How training ended whose ranks were found to hang, by what proof."""
    return _ending(Cause.HANG, evidence)


def on_the_way_out(ending: Ending, stopped_for: str) -> Ending:
    """`ending`, of ranks that had said before, or not, that they stop for a bad loss.

    If they had, that is the cause: they hung on their way out, or one was killed for being slow
    to go. A node that was lost on the way has its own.
    """
    if not stopped_for or ending.cause in {Cause.NUMERICS, Cause.NODE_FAILURE}:
        return ending
    return _ending(Cause.NUMERICS, [stopped_for, *ending.evidence])


def _is_hang_up(heard: dict[str, Any]) -> bool:
    """True for what a dying node's step leaves its processes: SIGHUP, and no scheduler's mark.

    No scheduler announces a preemption by it.
    """
    marked = _PREEMPT_TIME.search(str(heard.get("detail", "")))
    return heard.get("name") == "SIGHUP" and not marked


def classify_crash(
    failures: Sequence[RankFailure],
    *,
    oom_kills: int = 0,
    lost_nodes: Sequence[str] = (),
    launch_log: str = "",
) -> tuple[Ending, RankFailure | None]:
    """How training ended that nobody asked to stop, and the rank whose failure came first.

    `oom_kills` counts the kernel's kills for want of memory during the launch, `launch_log`
    is the end of torchrun's own log.
    """
    if lost_nodes:
        return _ending(Cause.NODE_FAILURE, [f"node {n} was lost" for n in lost_nodes]), None
    first = first_failure(failures)
    if first is None:
        return _of_launch(launch_log, oom_kills), None
    if first.signal:
        return _of_killed(first, oom_kills), first
    who = f"rank {first.rank} ended with exit code {first.exit_code}"
    found = find_cause(first.text)
    if found is None and is_of_command(first.text):
        return _of_command(first, who), first
    if found is None:
        # Nobody but the program itself ends a process with a code.
        words = last_words(first.text) or "it left without an error message"
        return _ending(Cause.USER_ERROR, [f"{who}: {words}"]), first
    if oom_kills and KILLED_WORKER.search(found.quote):
        return _ending(Cause.HOST_OOM, [f"{who}: {found.quote}", _of_kernel(oom_kills)]), first
    return _ending(found.rule.cause, [f"{who}: {found.quote}"]), first


def _of_command(first: RankFailure, who: str) -> Ending:
    """How a rank ended that gave up because a command that it ran had failed."""
    words = f"{who}: {last_words(first.text)}"
    found = find_before_traceback(first.stderr_tail)
    if found is None:
        return _ending(Cause.UNKNOWN, [words])
    return _ending(found.rule.cause, [words, f"before that: {found.quote}"])


def _of_killed(first: RankFailure, oom_kills: int) -> Ending:
    """How a rank ended that a signal killed."""
    name = _signal_name(first.signal)
    who = f"rank {first.rank} was killed by signal {first.signal} ({name})"
    if first.signal == signal.SIGKILL and oom_kills:
        return _ending(Cause.HOST_OOM, [who, _of_kernel(oom_kills)])
    if first.signal in _FROM_OUTSIDE:
        return _ending(Cause.INFRASTRUCTURE, [who, "the kernel killed nothing for want of memory"])
    if first.signal in _WITH_WORDS and (found := find_cause(first.text)):
        return _ending(found.rule.cause, [f"{who}: {found.quote}"])
    words = last_words(first.text)
    return _ending(Cause.UNKNOWN, [f"{who}: {words}" if words else who])


def _of_launch(log: str, oom_kills: int) -> Ending:
    """How torchrun ended that named no rank."""
    if oom_kills:
        return _ending(Cause.HOST_OOM, ["torchrun ended", _of_kernel(oom_kills)])
    words = last_words(log)
    if found := _not_started(log):
        return _ending(Cause.USER_ERROR, [f"torchrun: {found}"])
    if named := find_cause(log):
        return _ending(named.rule.cause, [f"torchrun: {named.quote}"])
    said = f": {words}" if words else "; its log is silent"
    return _ending(Cause.INFRASTRUCTURE, [f"torchrun failed without naming a rank{said}"])


def _not_started(log: str) -> str:
    """The line by which a log says that the program could not even be started; may be empty."""
    lines = [line.strip() for line in log.splitlines()]
    return next((line for line in reversed(lines) if _NOT_STARTED.search(line)), "")


def _of_kernel(oom_kills: int) -> str:
    return f"kernel: oom_kill +{oom_kills}: it killed for want of memory"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The failure that came first: a killed rank before its peers' complaints about it."""
    return min(failures, key=_precedence, default=None)


def _precedence(failure: RankFailure) -> tuple[bool, bool, bool, bool, bool, float, int]:
    """Smallest for what came first. An abort may be how a peer's error shows, so it has words."""
    is_killed = failure.signal not in {0, signal.SIGABRT}
    found = None if is_killed else find_cause(failure.text)
    is_secondary = found is not None and found.rule.secondary_error
    # Of those who complain, one that gave up waiting is why others lost their connection.
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
    """The agent's own account, corrected where only the scheduler can know."""
    evidence = [*outcome.evidence, *(status.evidence if status and said_so(status) else ())]
    if outcome.state is _S.COMPLETED:
        return Ending(state=_S.COMPLETED, cause=None, evidence=_cut(evidence))
    said = _OF_SCHEDULER.get(status.raw) if status else None
    if said is not None and _may_correct(outcome, said):
        return _ending(said, evidence)
    return Ending(state=outcome.state, cause=outcome.cause, evidence=_cut(evidence))


def _may_correct(outcome: Outcome, said: Cause) -> bool:
    """True when the scheduler's last word is worth more than what the agent made of it."""
    if said is Cause.OPERATOR and outcome.state is _S.FAILED:
        # It had crashed by itself before anybody could cancel it.
        return False
    return outcome.cause in _GUESSES or (heard_a_signal(outcome) and not is_certain(outcome))


def heard_a_signal(outcome: Outcome) -> bool:
    """True when a signal made the agent stop: the reason for it is a judgement."""
    return any(line.startswith("signal:") for line in outcome.evidence)


def is_certain(outcome: Outcome) -> bool:
    """True when the agent saw the scheduler preempt the job, or nothing needs a second word."""
    if any(_PREEMPT_TIME.search(line) for line in outcome.evidence):
        return True
    return not heard_a_signal(outcome) and outcome.cause not in _GUESSES


def said_so(status: JobStatus) -> bool:
    """True when the scheduler gave a reason for the end, and not just the end."""
    return status.has_ended and status.raw in _OF_SCHEDULER


def _ending(cause: Cause, evidence: Sequence[str], state: AttemptState | None = None) -> Ending:
    return Ending(state=state or STATE_OF_CAUSE[cause], cause=cause, evidence=_cut(evidence))


def _cut(evidence: Sequence[str]) -> tuple[str, ...]:
    return tuple(line[:LINE_CHARACTERS_MAX] for line in dict.fromkeys(evidence))[:EVIDENCE_MAX]


def _of_signal(data: dict[str, Any]) -> str:
    detail = f": {data['detail']}" if data.get("detail") else ""
    return f"the agent heard {data.get('name', 'a signal')} from {data.get('source', '?')}{detail}"
