"""The exit statuses of Holdfast's programs, with their meaning, and of its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Final

from holdfast.cli.shared import exit_status as status
from holdfast.cli.shared.exit_status import exit_status
from holdfast.contracts import errors
from holdfast.trainer.process import standby
from holdfast.workers.agent import guard
from holdfast_docs.markdown import code, section, sentence, table

_number: Final = attrgetter("number")

EXIT_STATUSES: Final[Mapping[str, Mapping[int, str]]] = {
    "holdfast": {one.number: one.meaning for one in sorted(status.STATUSES, key=_number)},
    "python -m holdfast.flows.detached": {
        0: "the run completed",
        1: "the run failed or was cancelled",
        status.MISUSE: "the call is wrong",
    },
    "torchrun under the agent": {
        0: "all ranks exited with status 0. The agent compares this with what the program "
        "promised before it reports the attempt as completed",
        guard.KILLED_EXIT_CODE: "the agent ended the launch, or the agent was killed. Every "
        "process of the launch was killed",
    },
    "a rank of a warm standby": {
        standby.UNUSED_EXIT_CODE: "the attempt ended without a restart in place, so the standby "
        "was not needed",
    },
}


def render() -> str:
    """A table for each program that Holdfast starts or offers, and one of the errors."""
    parts = [
        section(
            2,
            code(program),
            table(
                ("status", "meaning"),
                [(code(status), sentence(meaning)) for status, meaning in statuses.items()],
            ),
        )
        for program, statuses in EXIT_STATUSES.items()
    ]
    rows = [
        (code(kind.__name__), code(status), sentence(_first_line(kind)))
        for kind, status in statuses_of_errors()
    ]
    parts.append(section(2, "Errors", table(("error", "status", "meaning"), rows)))
    return "\n".join(parts)


def statuses_of_errors() -> Iterator[tuple[type[errors.HoldfastError], int]]:
    """Each error that Holdfast raises on purpose, with the status of a command that it ends."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.HoldfastError):
            # The status depends on the class alone, and some need arguments.
            yield kind, exit_status(kind.__new__(kind))


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n\n")[0]
