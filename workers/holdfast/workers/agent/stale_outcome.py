"""Rename an outcome of another attempt that is in this attempt's folder."""

from __future__ import annotations

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.attempt import Outcome, is_of, read_document


def quarantine_stale_outcome(attempt: AttemptPaths, journal: JournalWriter) -> None:
    """Rename an outcome of another attempt and journal that, so that it is not taken for ours."""
    try:
        found = read_document(Outcome, attempt.outcome)
    except HoldfastError:
        # Reading the attempt reports a damaged outcome. It must not be moved.
        return
    if found is None or is_of(found, attempt.number):
        return
    aside = attempt.outcome.with_name(f"outcome.of-{found.attempt:04d}.json")
    attempt.outcome.rename(aside)
    text = (
        f"outcome.json belonged to attempt {found.attempt}, not to {attempt.number}; it was "
        f"renamed to {aside.name}"
    )
    journal.append(EventKind.NOTE, attempt=attempt.number, text=text)
