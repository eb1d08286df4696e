"""Builds the rows of a run that may have changed, from its history and its folder."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.contracts.disk.digests import document_digest
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import AttemptView, Lines, RunHistory
from holdfast.lineage.ingest import rows
from holdfast.lineage.ingest.checkpoint_totals import CheckpointTotals
from holdfast.lineage.ingest.clean import clean, redacted
from holdfast.lineage.ingest.disk import Row, read_checkpoint, survey_checkpoint
from holdfast.lineage.ingest.journal_lines import NewLines
from holdfast.lineage.ingest.run_writes import Change


class Own(Container[str]):
    """The directory names of the checkpoints in a run's folder."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def __contains__(self, name: object) -> bool:
        return bool(survey_checkpoint(self._paths, str(name)))


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds rows from one state of a run's history. `secrets` are masked in them."""

    history: RunHistory
    journaled: rows.Journaled
    origins: rows.Origins
    secrets: Sequence[str]

    @classmethod
    def of(cls, history: RunHistory, secrets: Sequence[str], journaled: rows.Journaled) -> Builder:
        return cls(
            history=history,
            journaled=journaled,
            origins=rows.Origins(history.record, Own(history.paths)),
            secrets=secrets,
        )

    def checkpoint(self, name: str, stamp: str, old: Row | None, deletion: Row | None) -> Change:
        """Return how the row of a checkpoint changes. `deletion` is who deleted it, if known."""
        if stamp:
            paths = self.history.paths
            found = read_checkpoint(paths, name, stamp, old)
        elif deletion is not None and (one := rows.only_journaled(name)) is not None:
            found = one
        else:
            return name, old, None, None
        row = rows.checkpoint_row(self.history, found, self.journaled, deletion, self.origins)
        return name, old, clean(redacted(row, self.secrets)), found

    def attempt(self, view: AttemptView, totals: CheckpointTotals) -> rows.AttemptRows:
        """Return the rows of an attempt."""
        committed_step = totals.committed_step(view.number)
        found = rows.attempt_rows(self.history, view, committed_step, self.origins)
        found.attempts[:] = [redacted(row, self.secrets) for row in found.attempts]
        return found

    def own(self) -> rows.AttemptRows:
        """Return the edges of the run itself."""
        return rows.own_edges(self.history, self.origins)


def journaled_of(
    lines: Lines, known: tuple[Lines, rows.Journaled] | None
) -> tuple[Lines, rows.Journaled]:
    """Return what lines record of checkpoints; `known` is the result of an earlier call."""
    if known is not None and known[0] is lines:
        # By identity: the lines of a history are new objects only if something has changed.
        return known
    return lines, rows.Journaled.of(lines)


def digest_of(found: rows.AttemptRows) -> str:
    """Return a digest of the rows of an attempt."""
    return document_digest(clean([found.attempts, found.nodes, found.launches, found.edges]))


def named_in(lines: Iterable[NewLines]) -> set[str]:
    """Return the checkpoints whose rows may depend on new lines."""
    return {name for one in lines for event in one.events for name in rows.names_in(event)}


def deleted_in(lines: Iterable[NewLines]) -> dict[str, Row]:
    """Return the deletions in new lines, by name."""
    found: dict[str, Row] = {}
    for one in lines:
        for event in one.events:
            if event.kind is EventKind.CHECKPOINT_DELETED:
                rows.add_deletion(found, event.data, event.time)
    return found


def newest_deletion(*some: Row | None) -> Row | None:
    """Return the newest of some deletions of a checkpoint. Of equal times, the first counts."""
    given = [one for one in some if one is not None]
    return max(given, key=lambda one: one["deleted_at"], default=None)


def deletion_of(
    name: str, old: Row | None, deletions: Mapping[str, Row], *, is_ignored: bool = False
) -> Row | None:
    """Return who deleted a checkpoint, from `deletions` or, unless `is_ignored`, its row."""
    return newest_deletion(deletions.get(name), None if is_ignored else rows.deletion_in(old))


def is_ambiguous(history: RunHistory, names: Iterable[str]) -> bool:
    """Return True if the run's origin may be one of its own checkpoints with these names.

    All ids are then resolved differently.
    """
    run, _, name = (history.record.forked_from or "").rpartition(":")
    # The id of the origin then means this run's own checkpoint, and every edge changes.
    return bool(name) and run in {"", history.record.run} and name in names
