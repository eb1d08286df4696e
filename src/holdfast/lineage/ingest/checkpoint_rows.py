"""Builds the rows of a run's checkpoints from their manifests and the journals. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.records.history import (
    Lines,
    RunHistory,
    excluded_checkpoints,
    pinned_checkpoints,
)
from holdfast.contracts.records.known_damage import DAMAGE_EVENTS, damaged_checkpoints, passed_over
from holdfast.lineage.database.states import INTEGER_MAX, CheckpointState
from holdfast.lineage.ingest.disk import FoundCheckpoint, Row, empty_facts
from holdfast.lineage.ingest.origins import Origins, bare

_DELETED: Final = ("deleted_reason", "deleted_by", "deleted_at")


@dataclass(frozen=True)
class Journaled:
    """What the journals record of checkpoints, by directory name, except deletions."""

    pins: Mapping[str, Event]
    excluded: frozenset[str]
    damage: Mapping[str, str]

    @classmethod
    def of(cls, lines: Lines) -> Journaled:
        pinned = {
            bare(name)
            for name in pinned_checkpoints(lines.of_kinds(EventKind.PINNED, EventKind.UNPINNED))
        }
        pins = {bare(e.data.get("checkpoint")): e for e in lines.of_kinds(EventKind.PINNED)}
        excluded = excluded_checkpoints(lines.of_kinds(EventKind.ROLLED_BACK))
        return cls(
            pins={name: one for name, one in pins.items() if name in pinned},
            excluded=frozenset(map(bare, excluded)),
            damage=damaged_checkpoints(lines.of_kinds(*DAMAGE_EVENTS)),
        )


def names_in(event: Event) -> Iterator[str]:
    """Yield the directory names of the checkpoints whose rows may depend on a journal line."""
    data = event.data
    if data.get("checkpoint"):
        yield bare(data["checkpoint"])
    if event.kind is EventKind.ROLLED_BACK:
        yield from map(bare, data.get("excluded") or ())
    if event.kind is EventKind.RESUMED:
        yield from (name for name, _ in passed_over(event))


def add_deletion(
    found: dict[str, Row], data: Mapping[str, Any], time: float, *, is_later: bool = True
) -> None:
    """Add who deleted a checkpoint, when and why, from a line; its newest one counts.

    Of two with the same time, the one that `is_later` counts.
    """
    name = bare(data.get("checkpoint"))
    former = found[name]["deleted_at"] if name in found else None
    if former is None or time > former or (is_later and time == former):
        facts = (data.get("reason"), data.get("by"), time)
        found[name] = dict(zip(_DELETED, facts, strict=True))


def deletion_in(row: Row | None) -> Row | None:
    """Return who deleted a checkpoint, when and why, from its row in the index, or None."""
    if row is None or row["deleted_at"] is None:
        return None
    return {column: row[column] for column in _DELETED}


def checkpoint_row(
    history: RunHistory,
    one: FoundCheckpoint,
    journaled: Journaled,
    deletion: Row | None,
    origins: Origins,
) -> Row:
    """Return the row of a checkpoint that was committed."""
    name = str(one.name)
    is_excluded = name in journaled.excluded
    detail = one.facts["detail"]
    if detail is None and not one.is_deleted and not is_excluded:
        detail = journaled.damage.get(name)
    state = CheckpointState.DAMAGED if detail else CheckpointState.COMMITTED
    parent = origins.parent(one.name, one.facts["parent"])
    pin = journaled.pins.get(name)
    deleted = deletion if one.is_deleted else None
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


def only_journaled(name: str) -> FoundCheckpoint | None:
    """Return a deleted checkpoint that has only a journal line, no directory and no tombstone."""
    parsed = CheckpointName.parse(name)
    if parsed is None or parsed.step > INTEGER_MAX:
        return None
    facts = empty_facts("it has no tombstone")
    return FoundCheckpoint(name=parsed, facts=facts, stamp="", is_deleted=True)
