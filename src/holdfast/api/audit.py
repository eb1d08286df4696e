"""The audit log: a journal line for every action, with user, address and outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from holdfast.api.access import Caller
from holdfast.api.problems import LOG
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError

WRITER: Final = "api"
OUTCOME_CHARACTERS_MAX: Final = 500


@contextlib.contextmanager
def audited(paths: RunPaths, action: str, caller: Caller, **facts: Any) -> Iterator[None]:
    """Record an action on a run and its outcome. A failed write does not stop the action."""
    outcome = "done"
    try:
        yield
    except HoldfastError as error:
        outcome = f"refused: {error}"[:OUTCOME_CHARACTERS_MAX]
        raise
    except Exception as error:
        outcome = f"failed: {error}"[:OUTCOME_CHARACTERS_MAX]
        raise
    finally:
        entry = {
            "action": action,
            "outcome": outcome,
            "by": caller.name,
            "role": str(caller.role),
            "address": caller.address,
            "token": caller.token,
            **facts,
        }
        try:
            with JournalWriter(paths.journal_of(WRITER)) as journal:
                # A full disk must not prevent a cancellation. The log has the line then.
                journal.append(EventKind.AUDIT, **entry)
        except OSError as error:
            LOG.warning("%s: cannot write the audit line (%s): %s", paths.name, error, entry)
