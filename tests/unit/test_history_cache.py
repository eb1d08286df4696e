"""A supervisor's turn reads only what has changed, however large the run is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.records import history_cache
from holdfast.contracts.records.history import RunHistory, load_history
from holdfast.contracts.records.history_cache import AGAIN_S, SETTLED_S, HistoryReader
from holdfast.contracts.states import AttemptState, Cause

# What the process has opened and listed since the last `clear`; see `record`.
_done: list[str] = []
_watched: list[Path] = []


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if event in {"open", "os.listdir", "os.scandir"} and _watched:
        path = str(arguments[0])
        if path.startswith(str(_watched[0])) or not path.startswith("/"):
            _done.append(f"{event} {path}")


# A hook cannot be removed, so it records only while a folder is watched.
sys.addaudithook(_record)


class Clock:
    """The monotonic clock of the module under test."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(history_cache, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def note(journal: Path, attempt: int) -> None:
    with JournalWriter(journal) as writer:
        writer.append(EventKind.NOTE, attempt=attempt, text="here")


def build(root: Path, attempts: int, nodes: int) -> RunFolder:
    """A run whose last attempt trains, after others that were preempted."""
    folder = RunFolder(root, "kelp", "u" * 32)
    for number in range(1, attempts + 1):
        at = T0 + 100.0 * number
        folder.submit(number, 2, at)
        folder.claim(number, at + 1)
        folder.launch(number, 1, 0, None)
        for node in range(nodes):
            note(folder.paths.attempt(number).node_journal(node), number)
        if number < attempts:
            folder.record_attempt_end(number, AttemptState.PREEMPTED, Cause.PREEMPTION, 10, at + 90)
    return folder


def cost_of_a_turn(folder: RunFolder, reader: HistoryReader) -> list[str]:
    _done.clear()
    _watched[:] = [folder.paths.directory]
    try:
        reader.load()
    finally:
        _watched.clear()
    return list(_done)


def facts(history: RunHistory) -> tuple[object, ...]:
    return history.attempts, history.state, history.tally.commits, history.tally.lines


@pytest.mark.more
def test_the_cost_of_a_turn_does_not_grow_with_attempts_or_nodes(
    tmp_path: Path, clock: Clock
) -> None:
    costs = []
    for attempts, nodes in ((2, 1), (12, 40)):
        folder = build(tmp_path / f"{attempts}", attempts, nodes)
        reader = HistoryReader(folder.paths)
        for _ in range(3):
            reader.load()
            clock.now += SETTLED_S
        costs.append(cost_of_a_turn(folder, reader))
    small, large = costs
    assert not [one for one in large if one.endswith(".jsonl")], "unchanged journals are not opened"
    assert len(large) == len(small) <= 12


def test_kept_attempts_are_what_a_whole_reading_returns(tmp_path: Path, clock: Clock) -> None:
    folder = build(tmp_path, 4, 3)
    reader = HistoryReader(folder.paths)
    for step in range(6):
        clock.now += SETTLED_S
        folder.tell("flow", EventKind.NOTE, attempt=4, text=f"turn {step}")
        folder.commit(10 * (step + 1), 4)
        assert facts(reader.load()) == facts(load_history(folder.paths))


def test_a_line_that_comes_late_is_seen_later(tmp_path: Path, clock: Clock) -> None:
    folder = build(tmp_path, 2, 1)
    reader = HistoryReader(folder.paths)
    for _ in range(3):
        before = reader.load()
        clock.now += SETTLED_S
    note(folder.paths.attempt(1).mirror_journal(0), 1)
    assert reader.load().tally.lines == before.tally.lines
    clock.now += AGAIN_S
    assert facts(reader.load()) == facts(load_history(folder.paths))


def test_a_run_that_was_deleted_is_not_found(tmp_path: Path, clock: Clock) -> None:
    folder = build(tmp_path, 2, 1)
    reader = HistoryReader(folder.paths)
    reader.load()
    folder.paths.spec.unlink()
    with pytest.raises(NotFoundError, match=r"no run here \(no spec\.json\)"):
        reader.load()
    assert not RunPaths(folder.paths.directory).spec.exists()
