"""Every action leaves a line in the run's journal: who, from where, what, and how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from holdfast.api.access import Caller
from holdfast.api.problems import LOG
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.paths import RunPaths, holdfast_home

WRITER: Final = "api"
WORDS_MAX: Final = 500


@contextlib.contextmanager
def audited(paths: RunPaths, action: str, caller: Caller, **facts: Any) -> Iterator[None]:
    """Record an action on a run, done or refused; a disk that is too full hinders no action."""
    outcome = "done"
    try:
        yield
    except HoldfastError as error:
        outcome = f"refused: {error}"[:WORDS_MAX]
        raise
    except Exception as error:
        outcome = f"failed: {error}"[:WORDS_MAX]
        raise
    finally:
        said = {"action": action, "outcome": outcome, **_who(caller), **facts}
        try:
            with JournalWriter(paths.journal_of(WRITER)) as journal:
                journal.append(EventKind.AUDIT, **said)
        except OSError as error:
            LOG.warning("%s: no line of audit (%s): %s", paths.name, error, said)


def audit_session(action: str, address: str, **facts: Any) -> None:
    """Record a log-in, a log-out or a failure of one, in the home's own journal."""
    try:
        with JournalWriter(holdfast_home() / "journal" / f"{WRITER}.jsonl") as journal:
            journal.append(EventKind.AUDIT, action=action, address=address, **facts)
    except OSError as error:
        LOG.warning("no line of audit (%s): %s from %s", error, action, address)


def _who(caller: Caller) -> dict[str, Any]:
    return {
        "by": caller.name,
        "role": str(caller.role),
        "address": caller.address,
        "token": caller.token,
    }
