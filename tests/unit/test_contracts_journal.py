"""The journal: whole lines only, numbered without gaps or duplicates, with several processes."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk import journal
from holdfast.contracts.disk import journal as journal_module
from holdfast.contracts.disk.journal import EventKind, JournalWriter, journal_lock, read_journal

JOIN_S = 60.0


def numbers(path: Path) -> list[tuple[int, int]]:
    return [(event.opening, event.sequence) for event in read_journal(path)[0]]


def write(path: Path, *texts: str) -> None:
    with JournalWriter(path) as writer:
        for text in texts:
            writer.append(EventKind.NOTE, text=text)


def test_lines_are_numbered_by_opening_and_sequence(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "flow.jsonl"
    write(path, "a", "b")
    write(path, "c")
    events, offset = read_journal(path)
    assert numbers(path) == [(1, 0), (1, 1), (2, 0)]
    assert [event.data["text"] for event in events] == ["a", "b", "c"]
    assert {event.writer for event in events} == {"flow"}
    assert offset == path.stat().st_size
    assert abs(events[0].time - time.time()) < JOIN_S


def test_reading_continues_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "flow.jsonl"
    write(path, "a")
    _, offset = read_journal(path)
    assert read_journal(path, offset) == ([], offset)
    write(path, "b")
    events, end = read_journal(path, offset)
    assert [event.data["text"] for event in events] == ["b"]
    assert end == path.stat().st_size
    assert read_journal(tmp_path / "none.jsonl", 5) == ([], 5)


@pytest.mark.parametrize("cut_bytes", [1, 2, 10, 60])
def test_a_torn_line_is_skipped_and_the_next_starts_a_new_line(
    cut_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "flow.jsonl"
    write(path, "a", "b")
    with open(path, "r+b") as stream:
        stream.truncate(path.stat().st_size - cut_bytes)
    events, offset = read_journal(path)
    assert [event.data["text"] for event in events] == ["a"]
    with pytest.warns(UserWarning, match=r"flow.jsonl: a crash cut off the last line"):
        write(path, "c")
    # A line that lost only its newline is complete.
    expected = ["b", "c"] if cut_bytes == 1 else ["c"]
    assert [event.data["text"] for event in read_journal(path, offset)[0]] == expected
    assert numbers(path)[-1] == (2, 0)


def test_numbering_continues_after_torn_lines_longer_than_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "TAIL_BYTES", 64)
    path = tmp_path / "flow.jsonl"
    write(path, "a")
    write(path, "b" * 1000)
    with open(path, "ab") as stream:
        stream.write(b'{"writer": "x' * 50 + b"\n" + b"\xff\x00" * 300 + b"\n" + b'{"wri')
    with pytest.warns(UserWarning, match="a crash cut off the last line"):
        write(path, "c")
    assert numbers(path) == [(1, 0), (2, 0), (3, 0)]


def test_a_line_over_the_size_limit_is_skipped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "flow.jsonl"
    write(path, "a", "b" * 400_000)
    bound = len(path.read_bytes().splitlines()[1])
    write(path, "c")
    monkeypatch.setattr(journal, "LINE_BYTES_MAX", bound)
    assert len(numbers(path)) == 3
    monkeypatch.setattr(journal, "LINE_BYTES_MAX", bound - 1)
    place = path.read_bytes().index(b"\n") + 1
    with pytest.warns(UserWarning, match=f"the line at byte {place} has {bound + 1} bytes"):
        events, offset = read_journal(path)
    assert [event.data["text"] for event in events] == ["a", "c"]
    assert offset == path.stat().st_size
    with path.open("ab") as stream:
        stream.write(b"x" * (2 * bound))
    with pytest.warns(UserWarning, match="was skipped"):
        assert read_journal(path)[1] == offset, "the line may still be completed"
    size = path.stat().st_size
    with JournalWriter(path) as writer, pytest.raises(ValueError, match="shorten its data"):
        writer.append(EventKind.NOTE, text="b" * bound)
    assert path.stat().st_size == size


def test_lines_in_other_formats_are_not_events(tmp_path: Path) -> None:
    path = tmp_path / "flow.jsonl"
    path.write_bytes(b'null\n\n  \n{"kind": "note"}\n[1]\n\xff\n{"a": \n')
    assert read_journal(path) == ([], path.stat().st_size)
    write(path, "a")
    assert numbers(path) == [(1, 0)]


def append_many(path: Path, name: str, count: int) -> None:
    with JournalWriter(path) as writer:
        for number in range(count):
            writer.append(EventKind.NOTE, durable=False, text=f"{name}{number}", filler="x" * 200)


def test_processes_that_share_a_journal_lose_and_duplicate_no_line(tmp_path: Path) -> None:
    path, count = tmp_path / "cli.jsonl", 150
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(path, n, count)) for n in "abc"]
    for process in writers:
        process.start()
    for process in writers:
        process.join(JOIN_S)
        assert process.exitcode == 0
    events, _ = read_journal(path)
    assert len(events) == 3 * count
    assert numbers(path) == sorted(set(numbers(path)))
    for name in "abc":
        own = [e.data["text"] for e in events if e.data["text"].startswith(name)]
        assert own == [f"{name}{number}" for number in range(count)]


def append_endlessly(path: Path) -> None:
    with JournalWriter(path) as writer:
        for number in range(1_000_000):
            writer.append(EventKind.NOTE, durable=False, text=str(number), filler="y" * 5000)


def test_a_killed_writer_leaves_whole_lines_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "node-0000.jsonl"
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        process = context.Process(target=append_endlessly, args=(path,))
        process.start()
        give_up = time.monotonic() + JOIN_S
        before = path.stat().st_size if path.exists() else 0
        while not path.exists() or path.stat().st_size < before + 50_000:
            assert time.monotonic() < give_up
            time.sleep(0.005)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(JOIN_S)
    write(path, "last")
    assert numbers(path) == sorted(set(numbers(path)))
    assert numbers(path)[-1] == (4, 0)


def test_a_failed_append_raises_and_the_next_line_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "flow.jsonl"
    real_write = os.write
    with JournalWriter(path) as writer:
        writer.append(EventKind.NOTE, text="a")
        monkeypatch.setattr(os, "write", lambda handle, data: real_write(handle, data[:20]))
        with pytest.raises(OSError, match="wrote 20 of"):
            writer.append(EventKind.NOTE, text="b")
        monkeypatch.undo()
        writer.append(EventKind.NOTE, text="c")
    assert [event.data["text"] for event in read_journal(path)[0]] == ["a", "c"]
    assert numbers(path) == [(1, 0), (2, 0)]


def test_every_json_value_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "flow.jsonl"
    data: dict[str, Any] = {
        "text": "zwölf\nlines\u2028",
        "none": None,
        "deep": {"a": [1, 2.5, True]},
    }
    with JournalWriter(path) as writer:
        event = writer.append(EventKind.NOTE, **data)
    assert read_journal(path)[0] == [event]
    assert event.data == data


def test_waiting_for_a_locked_journal_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "OWN_LOCK_S", 0.2)
    with (
        JournalWriter(tmp_path / "flow.jsonl") as writer,
        open(journal_lock(writer.path), "rb") as other,
    ):
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"\.flow\.lock: locked by another process"):
            writer.append(EventKind.NOTE, text="a")
        fcntl.flock(other, fcntl.LOCK_UN)
        writer.append(EventKind.NOTE, text="b")
    assert [e.data["text"] for e in read_journal(tmp_path / "flow.jsonl")[0]] == ["b"]
