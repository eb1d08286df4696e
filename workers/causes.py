"""Why an attempt ended: a pure reading of records, the scheduler's, the agent's and people's.

Exit codes alone decide nothing: torchrun exits non-zero after a clean preemption.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.attempt import Outcome, StopRequest
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.executors.base import JobStatus

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

_PATTERNS: Final[tuple[tuple[re.Pattern[str], Cause], ...]] = (
    (
        re.compile(r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|HIP out of memory"),
        Cause.GPU_OOM,
    ),
    (
        re.compile(r"No space left on device|Errno 28\b|ENOSPC|Disk quota exceeded|Errno 122\b"),
        Cause.STORAGE_FULL,
    ),
    (
        re.compile(r"^MemoryError|Cannot allocate memory|Errno 12\b|DefaultCPUAllocator", re.M),
        Cause.HOST_OOM,
    ),
    (re.compile(r"^FloatingPointError|NumericsError", re.M), Cause.NUMERICS),
    (
        re.compile(
            r"Connection (closed|reset) by (remote )?peer|DistBackendError|DistNetworkError"
            r"|NCCL error|Broken pipe|Connection refused|connectFullMesh|Socket Timeout"
            r"|AgreementError|recvValue failed"
        ),
        Cause.INFRASTRUCTURE,
    ),
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
    stop: StopRequest | None = None,
    claimed: bool = False,
    lost_hosts: Sequence[str] = (),
) -> Ending:
    """How an attempt that is over ended.

    `signals` are the data of its `signal` journal lines, oldest first; `status` is None when the
    scheduler did not answer. `lost_hosts` are those that surviving agents found gone.
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
        silence = "the job is gone and its agent left no outcome"
        return _ending(Cause.UNKNOWN, [silence, *said], state=_S.LOST)
    never = "the job ended before its agent began; see the attempt's logs"
    return _ending(Cause.INFRASTRUCTURE, [never, *said], state=_S.LOST)


def _is_hang_up(heard: dict[str, Any]) -> bool:
    """True for what a dying node's step leaves its processes: SIGHUP, and no scheduler's mark.

    No scheduler announces a preemption by it.
    """
    marked = _PREEMPT_TIME.search(str(heard.get("detail", "")))
    return heard.get("name") == "SIGHUP" and not marked


def classify_crash(
    failures: Sequence[RankFailure], *, oom_kills: int = 0, lost_nodes: Sequence[str] = ()
) -> tuple[Ending, RankFailure | None]:
    """How training ended that nobody asked to stop, and the rank whose failure came first.

    `oom_kills` counts the kernel's kills for want of memory during the incarnation.
    """
    if lost_nodes:
        return _ending(Cause.NODE_FAILURE, [f"node {n} was lost" for n in lost_nodes]), None
    first = first_failure(failures)
    if first is None:
        words = "torchrun failed without naming a rank; see its log"
        return _ending(Cause.INFRASTRUCTURE, [words]), None
    who = f"rank {first.rank}"
    if first.signal and oom_kills:
        words = f"{who} was killed by signal {first.signal}; the kernel killed for want of memory"
        return _ending(Cause.HOST_OOM, [words]), first
    if first.signal:
        cause = Cause.INFRASTRUCTURE if first.signal in {9, 15} else Cause.UNKNOWN
        return _ending(cause, [f"{who} was killed by signal {first.signal}"]), first
    cause = text_cause(first.text) or Cause.USER_ERROR
    last = next((ln for ln in reversed(first.text.splitlines()) if ln.strip()), "no traceback")
    words = f"{who} ended with exit code {first.exit_code}: {last.strip()[:LINE_CHARACTERS_MAX]}"
    return _ending(cause, [words]), first


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The failure that came first: a killed rank before its peers' complaints about it."""
    ranked = sorted(
        failures,
        key=lambda f: (
            not f.signal,
            text_cause(f.text) is Cause.INFRASTRUCTURE,
            not f.traceback,
            f.timestamp,
            f.rank,
        ),
    )
    return ranked[0] if ranked else None


def text_cause(text: str) -> Cause | None:
    """The cause that a traceback's words give away, or None for the program's own errors."""
    # A chained traceback names the root first; what matters is anywhere in it.
    return next((cause for pattern, cause in _PATTERNS if pattern.search(text)), None)


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
