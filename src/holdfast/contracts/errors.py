"""The exceptions that Holdfast raises.

HoldfastError
├── SpecError (ValueError)               a run spec, override or argument is invalid
│   └── RunStateError                    the state of the run forbids the request
├── OutputExistsError (RuntimeError)     the file or folder to write exists already
├── PreflightError (RuntimeError)        something the run needs is missing; nothing was queued
├── RunConflictError (RuntimeError)      the name belongs to another live run
├── RequestConflictError (RuntimeError)  another operator's request is pending
├── OrdersChangedError (RuntimeError)    an order was given after the caller read the run
├── RunFailedError (RuntimeError)        a run ended as failed, with its cause
├── NotFoundError (LookupError)          no such run, attempt or checkpoint
├── UnreadableRunError (ValueError)      a run's folder is unreadable or its files are invalid
├── ForeignFileError (ValueError)        a link, pipe, device or huge file instead of a normal file
├── CheckpointError (RuntimeError)
│   ├── DamagedCheckpointError           bytes on disk differ from the manifest
│   ├── KeyMismatchError                 the saved keys and the requested keys differ
│   ├── MirrorError                      the mirror refused a request, or did not answer in time
│   └── SaveError                        a save did not become durable
├── SchedulerError (RuntimeError)        the scheduler refused a request, with its own message
│   ├── SubmissionRefusedError           the scheduler refused a job, for now or permanently
│   └── SchedulerUnavailableError        the scheduler did not answer: the state is unknown
├── NoticeError (RuntimeError)           a cloud's metadata service gave no valid answer
├── SecretError (RuntimeError)           a reference to a secret has no value, or an invalid one
├── InterfaceError (RuntimeError)        a node lacks the network interface that the spec names
├── NumericsError (ArithmeticError)      the loss is not finite, or far above earlier losses
├── LineageError (RuntimeError)          the database cannot be used
│   └── DamagedIndexError                its SQLite file is damaged
├── QueryError (ValueError)              an invalid page, sort or filter in a query
├── ServiceError (RuntimeError)          Prefect cannot be reached, or refused a request
├── SessionError (RuntimeError)          a program uses its Session in a wrong way
└── AgreementError (RuntimeError)        the ranks did not agree on a step in time
    └── MissingNodesError                nodes of an attempt did not join node 0

Each message states what was given, what was expected and what to do next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Final


class HoldfastError(Exception):
    """Base class of Holdfast's exceptions. `str(error)` is a message for the user."""


class SpecError(HoldfastError, ValueError):
    """A run spec, override or argument is invalid. `problems` lists every problem found."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class RunStateError(SpecError):
    """The state of a run forbids a request: it has ended, or is not paused."""


class OutputExistsError(HoldfastError, RuntimeError):
    """The file or folder that a command is to write exists already. Nothing was changed."""


class PreflightError(HoldfastError, RuntimeError):
    """Something the run needs is missing. Nothing was queued."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class RunConflictError(HoldfastError, RuntimeError):
    """The name belongs to another live run, or to a run that only `relaunch` continues."""


class RequestConflictError(HoldfastError, RuntimeError):
    """Another request is pending: `by` requested `action` at `at` (Unix seconds)."""

    def __init__(self, message: str, *, by: str, action: str, at: float) -> None:
        super().__init__(message)
        self.by = by
        self.action = action
        self.at = at


class OrdersChangedError(HoldfastError, RuntimeError):
    """An order was given after the caller read the run. Read the run and decide again."""


class RunFailedError(HoldfastError, RuntimeError):
    """A run that the caller waited for ended as failed. The message contains the cause."""


class NotFoundError(HoldfastError, LookupError):
    """There is no run, attempt or checkpoint with the given name."""


class UnreadableRunError(HoldfastError, ValueError):
    """A run's folder cannot be read, or its files have invalid contents."""


# The unexpected exceptions that damaged files in a run's folder can cause.
_UNFORESEEN: Final = (
    *(ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)


@contextlib.contextmanager
def reading_run(directory: object) -> Iterator[None]:
    """Convert unexpected exceptions of the block into `UnreadableRunError`.

    Exceptions of Holdfast and of the operating system are raised unchanged.
    """
    try:
        yield
    except HoldfastError:
        raise
    except _UNFORESEEN as error:
        raise UnreadableRunError(
            f"{directory}: cannot be read as a run: {type(error).__name__}: {error}; restore the "
            "damaged file, or move the folder out of the root"
        ) from error


class ForeignFileError(HoldfastError, ValueError):
    """A link, pipe, device or huge file is at `path`. A regular file was expected."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.problem = problem


class CheckpointError(HoldfastError, RuntimeError):
    """A checkpoint could not be written, read or verified."""


class DamagedCheckpointError(CheckpointError):
    """Bytes on disk differ from the manifest. `damaged` has a line for each file."""

    def __init__(self, message: str, damaged: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.damaged = tuple(damaged)


class KeyMismatchError(CheckpointError):
    """Saved and requested keys differ. `missing`, `extra` and `reshaped` list them."""

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[str] = (),
        extra: Iterable[str] = (),
        reshaped: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.extra = tuple(extra)
        self.reshaped = tuple(reshaped)


class MirrorError(CheckpointError):
    """The mirror refused or did not answer in time. With `is_passing`, a retry may succeed."""

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class SaveError(CheckpointError):
    """A save did not become durable. The previous checkpoint remains valid."""


class SchedulerError(HoldfastError, RuntimeError):
    """The scheduler refused a request. The message contains the scheduler's own message."""


class SubmissionRefusedError(SchedulerError):
    """The scheduler refused a job. With `may_pass`, it may accept the same job later."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class SchedulerUnavailableError(SchedulerError):
    """The scheduler did not answer. The job may still exist: its state is unknown."""


class NoticeError(HoldfastError, RuntimeError):
    """A cloud's metadata service sent an invalid answer, or none in time."""


class SecretError(HoldfastError, RuntimeError):
    """A reference to a secret has no usable value. The message never contains the value."""


class InterfaceError(HoldfastError, RuntimeError):
    """A node cannot use the network interface that the spec names."""


class NumericsError(HoldfastError, ArithmeticError):
    """The loss is not finite, or is far above earlier losses, and training must stop."""


class LineageError(HoldfastError, RuntimeError):
    """The lineage database cannot be used in its present state."""


class DamagedIndexError(LineageError):
    """The SQLite file of the index is damaged, or is not a database."""


class QueryError(HoldfastError, ValueError):
    """A query of the index is invalid, such as one with a broken cursor or an unlimited page."""


class ServiceError(HoldfastError, RuntimeError):
    """Prefect cannot be reached, or refused a request."""


class SessionError(HoldfastError, RuntimeError):
    """A program uses its Session in a wrong way, such as two sessions at the same time."""


class AgreementError(HoldfastError, RuntimeError):
    """The ranks did not agree on a step, or did not answer, within the time limit."""


class MissingNodesError(AgreementError):
    """Some nodes of an attempt did not join node 0. `missing` has their numbers."""

    def __init__(self, message: str, missing: Collection[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
