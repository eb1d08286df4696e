"""Tags and notes that people give a run or one of its checkpoints, at any time.

Each change is one journal line: tags that it adds, tags that it removes, and a note or none. All
lines are in one journal, `journal/annotations.jsonl`, so their order does not depend on clocks. A
line changes only what it names. So two people who add a tag at the same time both succeed, and
the newest note counts. A run begins with the tags of its spec.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.contracts.disk import journal_follow, manifest
from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.disk.paths import CheckpointName, RunPaths, checkpoint_id
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history import load_identity
from holdfast.contracts.spec.tags import TAG, TAGS_MAX, problem_with_tags

ANNOTATIONS: Final = "annotations"
NOTE_CHARACTERS_MAX: Final = 4000
# Other controls, and characters that a reader cannot see or that change the order of the text.
_REFUSED: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
# Lines and tabs, and the joiners that emoji and some scripts need.
_ALLOWED: Final = frozenset("\n\t\u200c\u200d")


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """The tags and the note of a run or a checkpoint; `note_at` is Unix seconds."""

    tags: tuple[str, ...] = ()
    note: str = ""
    note_by: str = ""
    note_at: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The columns of the index, and the keys of answers. What is missing is None."""
        return {
            "tags": list(self.tags),
            "note": self.note or None,
            "note_by": (self.note_by or None) if self.note else None,
            "note_at": self.note_at if self.note else None,
        }


NONE: Final = Annotation()


def fold_annotations(
    events: Iterable[Event], first_tags: Sequence[str] = ()
) -> dict[str, Annotation]:
    """Return the annotations by the directory name of the checkpoint; the run's own is at `""`.

    `events` are in the journal's order, and `first_tags` are those of the spec. Others may have
    written lines: what `annotate` would refuse in one is ignored.
    """
    found = {"": _changed(NONE, first_tags, ())}
    for event in events:
        if event.kind is not EventKind.ANNOTATED:
            continue
        data = event.data
        name = str(data.get("checkpoint") or "").rpartition(":")[2]
        if name and CheckpointName.parse(name) is None:
            continue
        one = _changed(
            found.get(name, NONE), data.get("tags_added") or (), data.get("tags_removed") or ()
        )
        note = data.get("note")
        if note is not None and problem_with_note(note) is None:
            by = str(data.get("by") or "")
            one = replace(one, note=note.strip(), note_by=by, note_at=event.time)
        found[name] = one
    return found


def _changed(former: Annotation, added: Iterable[str], removed: Iterable[str]) -> Annotation:
    tags = set(former.tags).difference(removed)
    for tag in added:
        if len(tags) == TAGS_MAX:
            break
        if TAG.fullmatch(tag):
            tags.add(tag)
    return replace(former, tags=tuple(sorted(tags)))


def require_note(note: str) -> None:
    """Raise `SpecError` for text that cannot be the note of a change, a pin or an answer."""
    if (problem := problem_with_note(note)) is not None:
        raise SpecError(problem)


def problem_with_note(note: str) -> str | None:
    """Return why `note` cannot be a note, or None. Empty text removes the note."""
    if len(note) > NOTE_CHARACTERS_MAX:
        return f"a note of {len(note)} characters, expected at most {NOTE_CHARACTERS_MAX}"
    for number, one in enumerate(note, 1):
        if one not in _ALLOWED and unicodedata.category(one) in _REFUSED:
            return (
                f"the note has the control or invisible character {one!a} at position "
                f"{number}; remove it"
            )
    return None


def annotate(
    paths: RunPaths,
    checkpoint: str | None = None,
    *,
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
    note: str | None = None,
    by: str,
    via: str,
) -> Annotation:
    """Change the tags and the note of a run, or of one of its checkpoints; return the new state.

    `note` is None to leave it as it is, and empty to remove it. `via` names the part of Holdfast
    that took the change.

    Raises `SpecError` for what cannot be a tag or a note, and `NotFoundError` if there is no such
    run or checkpoint.
    """
    _require(add, remove, note)
    record, spec = load_identity(paths)
    # A deleted checkpoint is shown nowhere with its tags.
    if checkpoint is not None and manifest.read_manifest(paths.checkpoint(checkpoint)) is None:
        raise NotFoundError(
            f"{checkpoint_id(record.run, checkpoint)}: no committed checkpoint; `holdfast "
            f"checkpoints {record.run}` lists them"
        )
    target = checkpoint or ""
    subject = checkpoint_id(record.run, checkpoint) if checkpoint else f"run {record.run}"

    def current() -> Annotation:
        events = journal_follow.KEPT.read(paths.journal_of(ANNOTATIONS))
        return fold_annotations(events, spec.tags).get(target, NONE)

    former = current()
    if len({*former.tags, *add} - set(remove)) > TAGS_MAX:
        raise _too_many(subject, former.tags)
    facts: dict[str, Any] = {
        "checkpoint": checkpoint,
        "tags_added": sorted(set(add)),
        "tags_removed": sorted(set(remove)),
        "note": note,
    }
    with JournalWriter(paths.journal_of(ANNOTATIONS)) as journal:
        given = {key: value for key, value in facts.items() if value not in (None, [])}
        journal.append(EventKind.ANNOTATED, **given, by=by, via=via)
    found = current()
    # Another process may have added the last tags in the same moment.
    if len(found.tags) == TAGS_MAX and not set(add) <= set(found.tags):
        raise _too_many(subject, found.tags)
    return found


def _require(add: Sequence[str], remove: Sequence[str], note: str | None) -> None:
    if not add and not remove and note is None:
        raise SpecError("nothing to change: expected a tag to add, a tag to remove, or a note")
    problems = [problem_with_tags(add), problem_with_tags(remove)]
    problems.append(problem_with_note(note) if note is not None else None)
    if both := sorted(set(add) & set(remove)):
        problems.append(f"{', '.join(both)}: expected a tag to add or to remove, not both")
    if found := [one for one in problems if one]:
        raise SpecError("; ".join(found), found)


def _too_many(subject: str, tags: Sequence[str]) -> SpecError:
    return SpecError(
        f"{subject} has {counted(len(tags), 'tag')} of at most {TAGS_MAX}, so not all of the "
        f"new ones fit; remove some first: {', '.join(tags)}"
    )
