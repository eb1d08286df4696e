"""The states of attempts and runs, the causes of endings, and the transitions of attempts."""

from __future__ import annotations

from enum import StrEnum


class AttemptState(StrEnum):
    """The state of one scheduler job of a run."""

    CREATED = "created"
    SUBMITTED = "submitted"
    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETED = "completed"
    PREEMPTED = "preempted"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    HUNG = "hung"
    NODE_FAILED = "node_failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def is_terminal(self) -> bool:
        """True when no further transition is allowed."""
        return not ATTEMPT_MOVES[self]


class RunState(StrEnum):
    """The state of a run, over all its attempts."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_live(self) -> bool:
        """True while a supervisor is expected to continue the run."""
        return self in {RunState.QUEUED, RunState.RUNNING, RunState.WAITING, RunState.PAUSED}


class Cause(StrEnum):
    """Why an attempt ended. The cause comes from records, never from an exit code alone."""

    PREEMPTION = "preemption"
    TIME_LIMIT = "time_limit"
    NODE_FAILURE = "node_failure"
    HANG = "hang"
    HOST_OOM = "host_oom"
    GPU_OOM = "gpu_oom"
    STORAGE_FULL = "storage_full"
    NUMERICS = "numerics"
    USER_ERROR = "user_error"
    INFRASTRUCTURE = "infrastructure"
    OPERATOR = "operator"
    UNKNOWN = "unknown"


_A = AttemptState
_ENDED_ALIVE = frozenset(
    {_A.COMPLETED, _A.PREEMPTED, _A.TIMED_OUT, _A.FAILED, _A.HUNG, _A.NODE_FAILED, _A.CANCELLED}
)
# Any live state may be followed by any ending: the supervisor may miss the states in between.
ATTEMPT_MOVES: dict[AttemptState, frozenset[AttemptState]] = {
    _A.CREATED: frozenset({_A.SUBMITTED, _A.PENDING, _A.RUNNING, _A.STOPPING, _A.LOST})
    | _ENDED_ALIVE,
    _A.SUBMITTED: frozenset({_A.PENDING, _A.RUNNING, _A.STOPPING, _A.LOST}) | _ENDED_ALIVE,
    _A.PENDING: frozenset({_A.RUNNING, _A.STOPPING, _A.LOST}) | _ENDED_ALIVE,
    _A.RUNNING: frozenset({_A.STOPPING, _A.LOST}) | _ENDED_ALIVE,
    _A.STOPPING: frozenset({_A.LOST}) | _ENDED_ALIVE,
    **{state: frozenset() for state in (*_ENDED_ALIVE, _A.LOST)},
}
