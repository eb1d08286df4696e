"""Builds the rows of a run's checkpoints from their manifests and the journals. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.history import RunHistory, excluded_checkpoints, pinned_checkpoints
from holdfast.contracts.journal import Event, EventKind
from holdfast.contracts.paths import CheckpointName
from holdfast.lineage.disk import FoundCheckpoint, Row, empty_facts
from holdfast.lineage.origins import Origins, bare
from holdfast.lineage.states import INTEGER_MAX, CheckpointState

_DELETED: Final = ("deleted_reason", "deleted_by", "deleted_at")
_NAME_INSIDE: Final = re.compile(r"step-\d{8,}\.a\d{4,}\.l\d{2,}")


@dataclass(frozen=True)
class _Journaled:
    """What the journals record of checkpoints, by directory name."""

    pins: Mapping[str, Event]
    deletions: Mapping[str, Row]
    excluded: frozenset[str]
    damage: Mapping[str, str]


def checkpoint_rows(
    history: RunHistory,
    found: Sequence[FoundCheckpoint],
    deleted: Mapping[str, Row],
    origins: Origins,
) -> list[Row]:
    """Return a row for each checkpoint that was committed, by step.

    `deleted` has the deletions, by name, see `deletions`.
    """
    journaled = _read_events(history.events, deleted)
    every = [*found, *_only_journaled(found, journaled.deletions)]
    rows = [_row(history, one, journaled, origins) for one in every]
    return sorted(rows, key=lambda r: (r["step"], r["attempt"], r["launch"]))


def _read_events(events: Sequence[Event], deleted: Mapping[str, Row]) -> _Journaled:
    pins = {bare(e.data.get("checkpoint")): e for e in events if e.kind is EventKind.PINNED}
    pinned = {bare(name) for name in pinned_checkpoints(events)}
    return _Journaled(
        pins={name: one for name, one in pins.items() if name in pinned},
        deletions=deleted,
        excluded=frozenset(bare(name) for name in excluded_checkpoints(events)),
        damage=_damage_at_resume(events),
    )


def deletions_in(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return who deleted which checkpoint, when and why, from rows of the index by name."""
    return {
        name: {column: row[column] for column in _DELETED}
        for name, row in rows.items()
        if row["deleted_at"] is not None
    }


def deletions(lines: Iterable[Event], before: Mapping[str, Row]) -> dict[str, Row]:
    """Return the deletions in `before` and in journal lines. The newest of a checkpoint counts."""
    found = dict(before)
    for event in lines:
        if event.kind is EventKind.CHECKPOINT_DELETED:
            name, data = bare(event.data.get("checkpoint")), event.data
            if name not in found or event.time >= found[name]["deleted_at"]:
                facts = (data.get("reason"), data.get("by"), event.time)
                found[name] = dict(zip(_DELETED, facts, strict=True))
    return found


def _row(history: RunHistory, one: FoundCheckpoint, journaled: _Journaled, origins: Origins) -> Row:
    name = str(one.name)
    is_excluded = name in journaled.excluded
    detail = one.facts["detail"]
    if detail is None and not one.is_deleted and not is_excluded:
        detail = journaled.damage.get(name)
    state = CheckpointState.DAMAGED if detail else CheckpointState.COMMITTED
    parent = origins.parent(one.name, one.facts["parent"])
    pin = journaled.pins.get(name)
    deleted = journaled.deletions.get(name) if one.is_deleted else None
    return {
        **one.facts,
        "run_uid": history.record.uid,
        "name": name,
        "step": one.name.step,
        "attempt": one.name.attempt,
        "launch": one.name.launch,
        "state": str(CheckpointState.DELETED if one.is_deleted else state),
        "detail": detail,
        "path": f"{history.paths.checkpoints}/{name}",
        "parent": origins.name(one.facts["parent"]),
        "parent_uid": parent[0] if parent else None,
        "parent_name": str(parent[1]) if parent else None,
        "parent_step": parent[1].step if parent else None,
        "pinned": pin is not None,
        "pinned_by": str(pin.data.get("by") or "") or None if pin else None,
        "pinned_at": pin.time if pin else None,
        "pin_note": str(pin.data.get("note") or "") or None if pin else None,
        "rolled_back": is_excluded,
        **(deleted or dict.fromkeys(_DELETED)),
        "stamp": one.stamp,
    }


def _only_journaled(
    found: Sequence[FoundCheckpoint], deletions: Iterable[str]
) -> Iterator[FoundCheckpoint]:
    """Yield deleted checkpoints that have only a journal line, no directory and no tombstone."""
    there = {str(one.name) for one in found}
    for text in deletions:
        name = CheckpointName.parse(text)
        if name and text not in there and name.step <= INTEGER_MAX:
            facts = empty_facts("it has no tombstone")
            yield FoundCheckpoint(name=name, facts=facts, stamp="", is_deleted=True)


def _damage_at_resume(events: Iterable[Event]) -> dict[str, str]:
    """Return why resumes skipped checkpoints, by name, unless a later resume loaded them."""
    skipped: dict[str, str] = {}
    for event in events:
        if event.kind is not EventKind.RESUMED:
            continue
        for line in event.data.get("skipped") or ():
            match = _NAME_INSIDE.search(str(line))
            if match:
                skipped[match[0]] = str(line)
        skipped.pop(bare(event.data.get("checkpoint")), None)
    return skipped
