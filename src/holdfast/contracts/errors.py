"""Every error that Holdfast raises on purpose.

HoldfastError
├── SpecError (ValueError)               a run spec, override or argument that cannot be meant
├── PreflightError (RuntimeError)        something the run needs is missing; nothing was queued
├── RunConflictError (RuntimeError)      the name belongs to another live run
├── RequestConflictError (RuntimeError)  another operator has just asked for something else
├── RunFailedError (RuntimeError)        a run ended failed, with its cause
├── NotFoundError (LookupError)          no such run, attempt or checkpoint
├── UnreadableRunError (ValueError)      a run's folder that cannot be read or believed
├── ForeignFileError (ValueError)        a link, a pipe, a device or a huge file where none may be
├── IllegalTransitionError (RuntimeError) a state change that the transition table does not have
├── CheckpointError (RuntimeError)
│   ├── DamagedCheckpointError           bytes on disk differ from the manifest
│   ├── KeyMismatchError                 the keys saved and the keys wanted differ
│   ├── MirrorError                      the mirror refused, or did not answer in time
│   └── SaveError                        a save did not become durable
├── SchedulerError (RuntimeError)        the scheduler refused, with its own words
│   ├── SubmissionRefusedError           the scheduler refused a job, for now or for good
│   └── SchedulerUnavailableError        the scheduler did not answer: the state is unknown
├── NoticeError (RuntimeError)           a cloud's metadata service answered nonsense, or nothing
├── SecretError (RuntimeError)           a reference to a secret has no value, or a wrong one
├── NumericsError (ArithmeticError)      the loss is not finite, or far above what it was
├── LineageError (RuntimeError)          the database cannot be used
│   └── DamagedIndexError                its SQLite file is damaged
├── QueryError (ValueError)              a page, a sort or a filter that nothing can answer
├── ServiceError (RuntimeError)          Prefect cannot be reached or refused
├── SessionError (RuntimeError)          a program uses its Session as it must not
└── AgreementError (RuntimeError)        ranks could not agree on a step in time

A message says what was given, what was expected and what to do next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final


class HoldfastError(Exception):
    """Base of all errors raised on purpose; `str(error)` is meant for people."""


class SpecError(HoldfastError, ValueError):
    """A run spec, override or argument that cannot be meant; `problems` lists every one found."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class PreflightError(HoldfastError, RuntimeError):
    """Something the run needs is missing; nothing was queued."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class RunConflictError(HoldfastError, RuntimeError):
    """The name belongs to another live run, or to one that only `relaunch` continues."""


class RequestConflictError(HoldfastError, RuntimeError):
    """An operator's request is still under way: `by` asked for `action` at `at`, Unix seconds."""

    def __init__(self, message: str, *, by: str, action: str, at: float) -> None:
        super().__init__(message)
        self.by = by
        self.action = action
        self.at = at


class RunFailedError(HoldfastError, RuntimeError):
    """A run that was waited for ended failed; the message carries the cause."""


class NotFoundError(HoldfastError, LookupError):
    """No run, attempt or checkpoint answers to what was given."""


class UnreadableRunError(HoldfastError, ValueError):
    """A run's folder that cannot be read, or whose files cannot be believed."""


# What files in a run's folder can raise that nobody foresaw, when it is read as a run's.
_UNFORESEEN: Final = (
    *(ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)


@contextlib.contextmanager
def reading_run(directory: object) -> Iterator[None]:
    """Turn whatever a run's own files make the block raise into `UnreadableRunError`.

    Errors of Holdfast itself and of the operating system stay what they are.
    """
    try:
        yield
    except HoldfastError:
        raise
    except _UNFORESEEN as error:
        raise UnreadableRunError(
            f"{directory}: cannot be read as a run: {type(error).__name__}: {error}; restore the "
            "file that is damaged, or move the folder out of the root"
        ) from error


class ForeignFileError(HoldfastError, ValueError):
    """A link, a pipe, a device or a huge file at `path`, where an ordinary file is expected."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.problem = problem


class IllegalTransitionError(HoldfastError, RuntimeError):
    """A state change that the transition table does not have."""


class CheckpointError(HoldfastError, RuntimeError):
    """A checkpoint could not be written, read or believed."""


class DamagedCheckpointError(CheckpointError):
    """Bytes on disk differ from the manifest; `damaged` holds a line for each file."""

    def __init__(self, message: str, damaged: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.damaged = tuple(damaged)


class KeyMismatchError(CheckpointError):
    """The keys saved and the keys wanted differ; `missing`, `extra` and `reshaped` name them."""

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
    """The mirror refused, or did not answer in time; `is_passing` says that it may yet do so."""

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class SaveError(CheckpointError):
    """A save did not become durable; the checkpoint before it still stands."""


class SchedulerError(HoldfastError, RuntimeError):
    """The scheduler refused a request; the message carries its own words."""


class SubmissionRefusedError(SchedulerError):
    """The scheduler refused a job; `may_pass` says that it may take the same job later."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class SchedulerUnavailableError(SchedulerError):
    """The scheduler did not answer. A job's state is then unknown, never absent."""


class NoticeError(HoldfastError, RuntimeError):
    """A cloud's metadata service answered what cannot be meant, or not in time."""


class SecretError(HoldfastError, RuntimeError):
    """A reference to a secret that has no value, or one that cannot be used; never the value."""


class NumericsError(HoldfastError, ArithmeticError):
    """The loss is not finite, or far above what it was, and training must not simply go on."""


class LineageError(HoldfastError, RuntimeError):
    """The lineage database cannot be used as it is."""


class DamagedIndexError(LineageError):
    """The SQLite file of the index is damaged, or is no database."""


class QueryError(HoldfastError, ValueError):
    """A question to the index that cannot be meant: a broken cursor, a page without an end."""


class ServiceError(HoldfastError, RuntimeError):
    """Prefect cannot be reached, or refused what was asked."""


class SessionError(HoldfastError, RuntimeError):
    """A program uses its Session as it must not, such as two of them at a time."""


class AgreementError(HoldfastError, RuntimeError):
    """Ranks could not agree on a step, or were left waiting for an answer, within the bound."""
