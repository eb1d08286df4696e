"""The journal cache: how many bytes of a known journal are read again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk import journal, journal_follow
from holdfast.contracts.disk.journal import EventKind, JournalWriter, read_journal
from holdfast.contracts.disk.journal_follow import SAMPLE_BYTES, JournalCache
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.records.history import load_history
from holdfast.lineage.database.transactions import open_database
from holdfast.lineage.ingest.run_ingest import ingest_run
from holdfast.lineage.queries.pages import list_events

LINES = 2000


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes of journals that were parsed since the last call."""
    real, found = journal._parse, [0]

    def count(content: bytes) -> Any:
        found[0] += len(content)
        return real(content)

    def since() -> int:
        total, found[0] = found[0], 0
        return total

    monkeypatch.setattr(journal, "_parse", count)
    return since


def write(path: Path, *texts: str) -> None:
    with JournalWriter(path) as writer:
        for text in texts:
            writer.append(EventKind.NOTE, durable=False, text=text)


def texts(cache: JournalCache, path: Path) -> list[str]:
    found = cache.read(path)
    assert found == tuple(read_journal(path)[0])
    return [event.data["text"] for event in found]


def test_only_the_new_line_of_a_long_journal_is_read(
    tmp_path: Path, parsed: Callable[[], int]
) -> None:
    folder = RunFolder(tmp_path / "runs", "kelp", "u" * 32)
    folder.submit(1, 2, 1_700_000_000.0)
    path = folder.paths.journal_of("cli")
    write(path, *(f"line {number}" for number in range(LINES)))
    with open_database(f"sqlite:///{tmp_path / 'index.db'}") as database:
        ingest_run(database, folder.paths)
        assert parsed() >= path.stat().st_size
        size = path.stat().st_size
        write(path, "one more")
        parsed()
        history = load_history(folder.paths)
        parsed()
        ingest_run(database, folder.paths)
        # Once for the rows of the run, and once for the row of the line.
        assert parsed() == 2 * (path.stat().st_size - size)
        assert history.events[-1].data == {"text": "one more"}
        newest = list_events(database, "kelp", limit=1).items
        assert newest[0]["data"] == {"text": "one more"}
        ingest_run(database, folder.paths, fresh=True)
        assert parsed() >= path.stat().st_size, "a reindex reads every line again"


def test_no_line_is_parsed_twice(tmp_path: Path, parsed: Callable[[], int]) -> None:
    path, cache = tmp_path / "journal" / "cli.jsonl", JournalCache()
    assert texts(cache, path) == []
    write(path, "a", "b")
    assert texts(cache, path) == ["a", "b"]
    parsed()
    assert len(cache.read(path)) == 2
    assert parsed() == 0


def test_a_torn_line_is_read_again_when_it_is_complete(tmp_path: Path) -> None:
    path, cache = tmp_path / "journal" / "cli.jsonl", JournalCache()
    write(path, "a", "b")
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 5)
    assert texts(cache, path) == ["a"]
    with open(path, "ab") as stream:
        stream.write(whole[-5:])
    assert texts(cache, path) == ["a", "b"]
    os.truncate(path, len(whole) - 5)
    assert texts(cache, path) == ["a"]
    write(path, "c")
    assert texts(cache, path) == ["a", "c"]


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_journal_that_was_replaced_is_read_from_the_start(
    tmp_path: Path, is_in_place: bool
) -> None:
    path, other, cache = tmp_path / "cli.jsonl", tmp_path / "other.jsonl", JournalCache()
    write(path, "a", "b", "c")
    write(other, *(f"other {number}" for number in range(SAMPLE_BYTES // 10)))
    texts(cache, path)
    if is_in_place:
        path.write_bytes(other.read_bytes())
    else:
        other.replace(path)
    assert texts(cache, path)[0] == "other 0"
    path.write_bytes(path.read_bytes()[:1])
    assert texts(cache, path) == []


def test_a_missing_journal_has_no_events_and_a_link_is_refused(tmp_path: Path) -> None:
    path, cache = tmp_path / "cli.jsonl", JournalCache()
    write(path, "a")
    assert texts(cache, path) == ["a"]
    kept = path.rename(tmp_path / "kept.jsonl")
    assert texts(cache, path) == []
    path.symlink_to(kept)
    with pytest.raises(ForeignFileError):
        cache.read(path)


def test_the_size_of_the_journal_cache_is_limited(
    tmp_path: Path, parsed: Callable[[], int]
) -> None:
    paths = [tmp_path / f"{number}.jsonl" for number in range(4)]
    for path in paths:
        write(path, "x" * 1000)
    size = paths[0].stat().st_size
    cache = JournalCache(bytes_max=2 * size + size // 2)
    for path in paths:
        cache.read(path)
    parsed()
    for path in reversed(paths):
        cache.read(path)
    assert size * 1.5 < parsed() < size * 2.5, "two of four were kept"
    write(paths[0], "y" * 10_000)
    assert texts(cache, paths[0]) == ["x" * 1000, "y" * 10_000]
    assert cache._bytes <= journal_follow.KEPT_BYTES_MAX
    assert (cache._bytes, cache._kept) == (0, {}), "a journal larger than the limit is not kept"
