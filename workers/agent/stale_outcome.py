"""Another attempt's outcome in this attempt's folder: set aside, and said."""

from __future__ import annotations

from holdfast.contracts.attempt import Outcome, is_of, read_document
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.paths import AttemptPaths


def quarantine_stale_outcome(attempt: AttemptPaths, journal: JournalWriter) -> None:
    """Rename an outcome of another attempt, and say so: it must not stand for this one's."""
    try:
        found = read_document(Outcome, attempt.outcome)
    except HoldfastError:
        # Whoever looks at the attempt is told of a damaged one; it is nobody's to move.
        return
    if found is None or is_of(found, attempt.number):
        return
    aside = attempt.outcome.with_name(f"outcome.of-{found.attempt:04d}.json")
    attempt.outcome.rename(aside)
    text = (
        f"outcome.json was that of attempt {found.attempt}, not of {attempt.number}; it was set "
        f"aside as {aside.name}"
    )
    journal.append(EventKind.NOTE, attempt=attempt.number, text=text)
