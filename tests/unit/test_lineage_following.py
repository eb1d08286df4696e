"""An update of the index by what is new gives the same rows as one from all files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.process.test_lineage_ingest import dump
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import MANIFEST
from holdfast.contracts.records import history_cache
from holdfast.contracts.records.documents import Outcome, read_document, write_document
from holdfast.contracts.states import AttemptState, Cause
from holdfast.lineage.database.transactions import Database, open_database
from holdfast.lineage.index import Index
from holdfast.lineage.ingest import disk, run_ingest, run_writes
from holdfast.lineage.ingest.run_ingest import ingest_run

NUMBERS: Final = itertools.count()
# Each is one change of a run's folder. Those in the second group are announced by no new line.
ANNOUNCED: Final = (
    *("save", "save", "delete", "delete_later", "pin", "unpin", "rollback", "damage", "request"),
    *("relaunch", "export", "report", "log", "silence", "replace_journal", "tell_nothing"),
    *("annotate", "annotate_checkpoint"),
)
SILENT: Final = ("late_outcome", "late_line", "unknown_save", "lost_tombstone", "lost_checkpoint")


class Story:
    """A run whose folder changes."""

    def __init__(self, root: Path) -> None:
        self.uid = f"{next(NUMBERS):032}"
        self.run = RunFolder(root, "kelp", self.uid)
        self.paths = self.run.paths
        self.attempt, self.step = 0, 0
        self.later: list[str] = []
        self.relaunch()

    @property
    def there(self) -> list[str]:
        return [
            str(one)
            for one in self.paths.list_checkpoint_names()
            if (self.paths.checkpoint(one) / MANIFEST).exists()
        ]

    def save(self) -> None:
        self.step += 10
        parent = self.there[-1] if self.there else None
        self.run.commit(self.step, self.attempt, at=T0 + self.step, parent=parent)

    def delete(self) -> None:
        for name in self.there[:1]:
            self.run.delete(name, f"keep.last 1: {name} is older")

    def delete_later(self) -> None:
        """Announce a deletion. The next call completes it."""
        for name in self.later:
            if name in self.there:
                make_directory(self.paths.tombstones)
                os.rename(self.paths.checkpoint(name) / MANIFEST, self.paths.tombstone(name))
        self.later = [] if self.later else self.there[:1]
        for name in self.later:
            self.run.tell("cli", EventKind.CHECKPOINT_DELETED, checkpoint=name, by="ann")

    def pin(self) -> None:
        for name in self.there[-1:]:
            self.run.tell("cli", EventKind.PINNED, checkpoint=name, by="ann", note="good")

    def unpin(self) -> None:
        for name in self.there[-1:]:
            self.run.tell("cli", EventKind.UNPINNED, checkpoint=name, by="ann")

    def rollback(self) -> None:
        if len(self.there) > 1:
            facts = {"to": self.there[-2], "excluded": self.there[-1:], "attempt": self.attempt}
            self.run.tell("api", EventKind.ROLLED_BACK, **facts)

    def damage(self) -> None:
        for name in self.there[-1:]:
            (self.paths.checkpoint(name) / MANIFEST).write_text("{")
            self.resume([f"{name}: damaged"])

    def resume(self, skipped: list[str]) -> None:
        with JournalWriter(self.paths.attempt(self.attempt).rank_journal) as journal:
            facts = {"attempt": self.attempt, "launch": 1, "step": 0, "skipped": skipped}
            journal.append(EventKind.RESUMED, durable=False, checkpoint=None, **facts)

    def request(self) -> None:
        facts = {"action": "pause", "by": "ann", "order": 1, "after_attempt": self.attempt}
        self.run.tell("orders", EventKind.OPERATOR_REQUEST, **facts)

    def relaunch(self) -> None:
        if self.attempt:
            end = (AttemptState.PREEMPTED, Cause.PREEMPTION, self.step)
            self.run.finish(self.attempt, *end, T0 + self.step + 5)
            facts = {"after_attempt": self.attempt, "action": "relaunch", "reason": "again"}
            self.run.tell("flow", EventKind.DECISION, **facts)
        self.attempt += 1
        self.run.submit(self.attempt, 2, T0 + self.step + 6)
        self.run.claim(self.attempt, T0 + self.step + 7)
        self.run.launch(self.attempt, 1, self.step, self.there[-1] if self.there else None)

    def export(self) -> None:
        for name in self.there[-1:]:
            self.run.tell("cli", EventKind.EXPORTED, checkpoint=name, path=f"/x/{self.step}")

    def report(self) -> None:
        for name in self.there[:2]:
            facts = {"checkpoint": name, "metric": "accuracy", "value": self.step / 100}
            self.run.tell("api", EventKind.METRIC, **facts)

    def annotate(self, **facts: Any) -> None:
        given: dict[str, Any] = {
            "tags_added": [f"t{self.step}"],
            "tags_removed": [f"t{self.step - 10}"],
        }
        if self.step % 20 == 0:
            given["note"] = f"at {self.step}"
        self.run.tell("annotations", EventKind.ANNOTATED, by="ann", **given, **facts)

    def annotate_checkpoint(self) -> None:
        for name in self.there[:1]:
            self.annotate(checkpoint=name)

    def log(self) -> None:
        self.step += 1
        self.run.log(self.attempt, 1, range(self.step, self.step + 3), T0)

    def silence(self) -> None:
        self.run.tell("flow", EventKind.NODE_LOST, attempt=self.attempt, host="node-b")

    def replace_journal(self) -> None:
        self.run.tell("cli", EventKind.NOTE, text="x")
        journal = self.paths.journal_of("cli")
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(lines[: len(lines) // 2]))

    def tell_nothing(self) -> None:
        pass

    def late_outcome(self) -> None:
        outcome = read_document(Outcome, self.paths.attempt(1).outcome)
        if outcome is not None:
            last = (outcome.last_step or 0) + 1
            changed = outcome.model_copy(update={"traceback": f"at {last}", "last_step": last})
            write_document(self.paths.attempt(1).outcome, changed)

    def late_line(self) -> None:
        with JournalWriter(self.paths.attempt(1).rank_journal) as journal:
            name = f"step-{self.step:08d}.a0001.l01"
            facts = {"attempt": 1, "checkpoint": name, "step": self.step}
            journal.append(EventKind.COMMITTED, durable=False, **facts)

    def unknown_save(self) -> None:
        journal = self.paths.attempt(self.attempt).rank_journal
        before = journal.read_bytes()
        self.save()
        journal.write_bytes(before)

    def lost_tombstone(self) -> None:
        for path in list(self.paths.tombstones.glob("*.json"))[:1]:
            path.unlink()

    def lost_checkpoint(self) -> None:
        for name in self.there[:1]:
            (self.paths.checkpoint(name) / MANIFEST).unlink()


def rows_of(database: Database, uid: str) -> dict[str, list[dict[str, Any]]]:
    """Every row of one run."""
    return {
        table: [row for row in rows if uid in (row.get("run_uid"), row.get("uid"))]
        for table, rows in dump(database).items()
    }


@contextmanager
def counted_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths of the runs of which all files were looked at."""
    looks: list[str] = []
    real = disk.survey

    def look(paths: Any) -> disk.Survey:
        looks.append(paths.name)
        return real(paths)

    monkeypatch.setattr(disk, "survey", look)
    yield looks
    monkeypatch.setattr(disk, "survey", real)


def look_again(index: Index) -> None:
    """Let the time pass after which all files are looked at again."""
    for progress in index._progress.values():
        if progress.state is not None:
            progress.state.looked_at -= history_cache.AGAIN_S


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(history_cache, "SETTLED_S", 0.0)
    with Index() as opened:
        yield opened


@pytest.mark.more
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(ANNOUNCED + SILENT), st.booleans(), st.booleans()), max_size=14
    )
)
def test_an_update_by_what_is_new_gives_the_rows_of_one_from_all_files(
    index: Index, tmp_path: Path, changes: list[tuple[str, bool, bool]]
) -> None:
    story = Story(tmp_path / f"runs-{next(NUMBERS)}")
    with open_database(f"sqlite:///{tmp_path / 'fresh.db'}") as fresh:
        is_silent = False
        for change, is_updated, is_beside in [*changes, ("tell_nothing", True, False)]:
            getattr(story, change)()
            is_silent |= change in SILENT
            if is_beside:
                ingest_run(index.open(), story.paths)
            if not is_updated:
                continue
            if is_silent:
                look_again(index)
                is_silent = False
            index.update(story.paths)
            ingest_run(fresh, story.paths, fresh=True)
            wanted = rows_of(fresh, story.uid)
            for table, rows in rows_of(index.open(), story.uid).items():
                assert rows == wanted[table], (table, change)


def test_a_journal_with_other_lines_of_the_same_number_is_read_again(
    index: Index, tmp_path: Path
) -> None:
    story = Story(tmp_path / "runs")
    for change in ("save", "export", "unpin"):
        getattr(story, change)()
    ingest_run(index.open(), story.paths)
    story.replace_journal()
    story.unpin()
    index.update(story.paths)
    with open_database(f"sqlite:///{tmp_path / 'fresh.db'}") as fresh:
        ingest_run(fresh, story.paths, fresh=True)
        assert rows_of(index.open(), story.uid) == rows_of(fresh, story.uid)


def test_changes_that_lines_announce_need_no_look_at_all_files(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path / "runs")
    index.update(story.paths)
    with counted_looks(monkeypatch) as looks:
        for change in [*ANNOUNCED, "delete_later", "save", "relaunch", "save"]:
            if change != "replace_journal":
                getattr(story, change)()
                index.update(story.paths)
                assert not looks, change


def test_an_update_that_another_process_made_is_taken_over(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path / "runs")
    story.save()
    index.update(story.paths)
    for change in ("save", "delete", "log", "save", "rollback", "relaunch"):
        getattr(story, change)()
        ingest_run(index.open(), story.paths)
        before = dump(index.open())
        with counted_looks(monkeypatch) as looks:
            index.update(story.paths)
            assert not looks, change
        assert dump(index.open()) == before
    with open_database(f"sqlite:///{tmp_path / 'fresh.db'}") as fresh:
        story.save()
        index.update(story.paths)
        ingest_run(fresh, story.paths, fresh=True)
        assert dump(index.open()) == dump(fresh)


@pytest.mark.parametrize("change", SILENT)
def test_changes_without_a_line_are_found_now_and_then(
    index: Index, tmp_path: Path, change: str
) -> None:
    story = Story(tmp_path / "runs")
    for _ in range(2):
        story.save()
        story.save()
        story.delete()
        story.relaunch()
    index.update(story.paths)
    index.update(story.paths)
    getattr(story, change)()
    index.update(story.paths)
    before = dump(index.open())
    look_again(index)
    index.update(story.paths)
    assert dump(index.open()) != before


def test_the_number_of_files_of_an_update_does_not_grow_with_the_run(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def count(name: str) -> None:
        real = getattr(os, name)

        def look(path: Any, *args: Any, **options: Any) -> Any:
            seen.append(str(path))
            return real(path, *args, **options)

        monkeypatch.setattr(os, name, look)

    for name in ("stat", "lstat", "scandir", "open"):
        count(name)
    counts = {}
    for size in (2, 12):
        story = Story(tmp_path / f"runs-{size}")
        for _ in range(size):
            for _ in range(size):
                story.save()
            while len(story.there) > 2:
                story.delete()
            story.relaunch()
        for _ in range(3):
            story.save()
            index.update(story.paths)
        story.save()
        seen.clear()
        index.update(story.paths)
        counts[size] = len(seen)
        assert not [path for path in seen if path.endswith("tombstones")]
    assert counts[2] == counts[12]


@pytest.mark.more
@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("is_beside", [False, True])
def test_a_large_change_takes_several_transactions(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fresh: bool, is_beside: bool
) -> None:
    story = Story(tmp_path / "runs")
    for _ in range(3):
        for _ in range(4):
            story.save()
        story.delete()
        story.delete()
        story.relaunch()
    story.rollback()
    with open_database(f"sqlite:///{tmp_path / 'fresh.db'}") as fresh:
        ingest_run(fresh, story.paths, fresh=True)
        wanted = dump(fresh)
    monkeypatch.setattr("holdfast.lineage.ingest.journal_lines.LINES_MAX", 7)
    monkeypatch.setattr("holdfast.lineage.ingest.run_writes.NAMES_MAX", 2)
    monkeypatch.setattr(run_ingest, "CHECKPOINTS_MAX", 2)
    database, written = index.open(), []
    real = run_writes.write_checkpoints

    def write(connection: Any, uid: str, changes: Any) -> None:
        real(connection, uid, changes)
        written.append(len(changes))

    def overtake(connection: Any, uid: str, changes: Any) -> None:
        monkeypatch.setattr(run_writes, "write_checkpoints", write)
        real(connection, uid, changes)
        # Another process writes before the next transaction.
        connection.exec_driver_sql("UPDATE runs SET fingerprint = 'another'")

    monkeypatch.setattr(run_writes, "write_checkpoints", overtake if is_beside else write)
    for _ in range(2):
        ingest_run(database, story.paths, fresh=is_fresh)
        assert dump(database) == wanted
    assert max(written) <= 2
    assert len(written) > 4
