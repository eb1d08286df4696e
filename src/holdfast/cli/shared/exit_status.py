"""Exit statuses of the `holdfast` command: one table of numbers, meanings and errors.

The reference page is generated from it. The first row that contains an error's class decides.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

from holdfast.contracts import errors


@dataclass(frozen=True)
class Status:
    """An exit status, what it means, and the errors that end a command with it."""

    number: int
    meaning: str
    errors: tuple[type[Exception], ...] = ()


SUCCESS: Final = 0
FAILED: Final = 1
MISUSE: Final = 2
NOT_FOUND: Final = 3
UNAVAILABLE: Final = 4
REFUSED: Final = 5
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM

STATUSES: Final = (
    Status(SUCCESS, "the command succeeded"),
    Status(
        NOT_FOUND,
        "there is no such run, attempt, checkpoint, file or folder. A path that a command reads "
        "does not exist, such as a spec, a source of weights or `--root`",
        (errors.NotFoundError,),
    ),
    Status(
        UNAVAILABLE,
        "something that the command needs cannot be used: the database, Prefect, the scheduler, a "
        "disk, a secret",
        (
            errors.LineageError,
            errors.MirrorError,
            errors.SchedulerUnavailableError,
            errors.SecretError,
            errors.ServiceError,
            OSError,
        ),
    ),
    Status(
        REFUSED,
        "the arguments are right, and the state of something forbids the request: the run has "
        "ended, or is not the one to order this; the name belongs to another run; the file or "
        "folder to write exists already; another request is pending; a preflight check failed; "
        "the scheduler refused the job; or you answered a question with no, Ctrl-C or Ctrl-D",
        (
            errors.OrdersChangedError,
            errors.OutputExistsError,
            errors.PreflightError,
            errors.RequestConflictError,
            errors.RunConflictError,
            errors.RunStateError,
            errors.SchedulerError,
        ),
    ),
    Status(
        FAILED,
        "the command found something bad or failed: a run that ended as failed (`submit --wait`), "
        "a damaged checkpoint (`verify`, `fork`, `export`), a failed check (`doctor`), a broken "
        "invariant (`drill`), a run that cannot be read (`show`, `reindex`), another revision of "
        "the schema (`db current`), or a run that has not ended in time (`wait --timeout`)",
        (errors.CheckpointError, errors.RunFailedError, errors.UnreadableRunError),
    ),
    Status(
        MISUSE,
        "the arguments are wrong: an unknown option, an invalid spec or value",
        (errors.HoldfastError,),
    ),
    Status(
        INTERRUPTED,
        "you interrupted the command. A run that it waited for or followed continues",
    ),
    Status(
        TERMINATED,
        "a drill or an export was ended by SIGTERM, after it removed what it had begun",
    ),
)


def exit_status(error: Exception) -> int:
    """Return the exit status for an error. An error of the call is none of Holdfast's."""
    found = (one.number for one in STATUSES if isinstance(error, one.errors))
    return next(found, MISUSE)
