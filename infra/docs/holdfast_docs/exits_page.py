"""Exit statuses, from `exit_statuses` and the errors of `holdfast.contracts.errors`."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.cli.shared.exit_status import exit_status
from holdfast.contracts import errors
from holdfast_docs.exit_statuses import EXIT_STATUSES
from holdfast_docs.markdown import code, section, sentence, table


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
