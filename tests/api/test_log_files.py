"""All log files of a run: the list, search with its bounds and its secrets, and download."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from tests.api.conftest import Served

from holdfast.api.logs import search as log_search
from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.paths import RunPaths

TRACEBACK: Final = "Traceback (most recent call last):\n  File a\nValueError: too small\n"
MEGABYTE: Final = 1024 * 1024


@pytest.fixture(scope="module")
def api(served: Served) -> httpx.Client:
    return served.client()


@pytest.fixture(scope="module")
def paths(served: Served) -> RunPaths:
    """The run `gpt` with a log of each kind in its attempts 1 and 3."""
    found = served.runs["gpt"].paths
    found.flow_log.write_text("attempt 3 was submitted\n")
    for number in (1, 3):
        attempt = found.attempt(number)
        for rank in (0, 1):
            log = attempt.rank_log(0, 1, rank)
            make_directory(log.parent)
            log.write_text(f"attempt {number} rank {rank}\nloss 2.5\n")
        (attempt.logs / "41_0_log.err").write_text("agent started\n")
        (attempt.logs / "41_submission.sh").write_text("#!/bin/bash\n")
        attempt.flusher_log(0).write_text("flusher started\n")
        (attempt.node_logs(0) / "l01" / "torchrun.log").write_text("torchrun started\n")
    found.attempt(3).rank_log(0, 1, 1, "stderr").write_text(f"warning\n{TRACEBACK}")
    return found


def get(api: httpx.Client, path: str, **query: Any) -> Any:
    answer = api.get(f"/api/v1/runs/gpt/log-files{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def find_all(api: httpx.Client, **query: Any) -> tuple[list[dict[str, Any]], int]:
    """Return all lines of a search, and the number of its requests."""
    found: list[dict[str, Any]] = []
    after: dict[str, Any] = {}
    for requests in range(1, 1000):
        answer = get(api, "/search", **query, **after)
        found += answer["matches"]
        if answer["next"] is None:
            return found, requests
        after = {"after": answer["next"]}
    raise AssertionError("the search does not end")


def test_the_logs_of_all_processes_are_listed(api: httpx.Client, paths: RunPaths) -> None:
    listed = get(api, "")
    assert [(one["kind"], one["rank"], one["stream"]) for one in listed] == [
        ("rank", 0, "stdout"),
        ("rank", 1, "stdout"),
        ("rank", 1, "stderr"),
        ("torchrun", None, None),
        ("agent", None, "stderr"),
        ("flusher", None, None),
        ("supervisor", None, None),
    ]
    assert [one["attempt"] for one in listed] == [3] * 6 + [None]
    for one in listed:
        part = get(api, "/part", file=one["file"], offset=0)
        assert part["text"] == (paths.directory / one["file"]).read_text()
        assert part["next_offset"] == part["bytes"] == one["bytes"]
        answer = api.get("/api/v1/runs/gpt/log-files/download", params={"file": one["file"]})
        assert answer.text == part["text"]
        assert "attachment" in answer.headers["content-disposition"]


@pytest.mark.parametrize(
    "name",
    [
        "spec.json",
        "private/secrets.json",
        "attempts/0003/logs/../../../spec.json",
        "attempts/0003/logs/41_submission.sh",
        "attempts/0003/logs/node-0000/l01/rank-00009.stdout.log",
        "/etc/passwd",
    ],
)
def test_only_logs_of_the_run_are_read(api: httpx.Client, paths: RunPaths, name: str) -> None:
    link = paths.attempt(3).rank_log(0, 1, 9)
    if not link.is_symlink():
        link.symlink_to("/etc/passwd")
    for route in ("part", "download", "search"):
        query = {"file": name, **({"text": "root"} if route == "search" else {})}
        answer = api.get(f"/api/v1/runs/gpt/log-files/{route}", params=query)
        assert answer.status_code == 404, (route, answer.text)
    assert find_all(api, text="root:")[0] == []


def test_a_search_finds_lines_of_all_ranks_and_attempts(api: httpx.Client, paths: RunPaths) -> None:
    found, _ = find_all(api, text="ATTEMPT")
    assert [one["text"] for one in found] == [
        "attempt 3 rank 0",
        "attempt 3 rank 1",
        "attempt 1 rank 0",
        "attempt 1 rank 1",
        "attempt 3 was submitted",
    ]
    in_parts, requests = find_all(api, text="ATTEMPT", limit=1)
    assert in_parts == found
    assert requests >= len(found)
    first = get(api, "/search", errors=True, limit=1)["matches"][0]
    assert (first["rank"], first["stream"], first["attempt"]) == (1, "stderr", 3)
    part = get(api, "/part", file=first["file"], offset=first["offset"])
    assert part["text"] == TRACEBACK


def test_a_search_continues_after_a_file_that_was_deleted(
    api: httpx.Client, paths: RunPaths
) -> None:
    after = get(api, "/search", text="attempt", limit=1)["next"]
    gone = f"9:{after.partition(':')[2].replace('rank-00000.stderr', 'rank-00000.stdout')}"
    gone = gone.replace("rank-00001.stdout", "rank-00000.stderr")
    texts = [one["text"] for one in get(api, "/search", text="attempt", after=gone)["matches"]]
    assert texts[0] == "attempt 3 rank 1"


def test_secrets_are_neither_found_nor_downloaded(api: httpx.Client, paths: RunPaths) -> None:
    log = paths.attempt(3).rank_log(0, 2, 0)
    make_directory(log.parent)
    try:
        log.write_text("login with hf_abcdefghijklmnop0123 done\n" + "x" * 300_000 + "\nlast\n")
        (found,) = get(api, "/search", text="login with")["matches"]
        assert found["text"] == f"login with {'*' * 23} done"
        for text in ("hf_", "abcdef", "0123 done"):
            assert get(api, "/search", text=text)["matches"] == []
        name = log.relative_to(paths.directory).as_posix()
        for encoding in ("gzip", "identity"):
            answer = api.get(
                "/api/v1/runs/gpt/log-files/download",
                params={"file": name},
                headers={"accept-encoding": encoding},
            )
            assert len(answer.text) == log.stat().st_size
            assert "hf_" not in answer.text
    finally:
        log.unlink()


def test_long_lines_and_bad_bytes_are_found(api: httpx.Client, paths: RunPaths) -> None:
    log = paths.attempt(3).rank_log(0, 2, 0)
    make_directory(log.parent)
    middle = 2 * MEGABYTE - 7
    try:
        log.write_bytes(b"x" * middle + b" needle \xff " + b"y" * MEGABYTE + b"\nneedle two\n")
        found, _ = find_all(api, text="needle")
        texts = [one["text"] for one in found]
        assert "needle" in texts[0]
        assert len(texts[0]) <= log_search.LINE_BYTES_MAX
        assert texts[-1] == "needle two"
        assert found[-1]["offset"] == log.stat().st_size - len("needle two\n")
    finally:
        log.unlink()


def test_a_last_line_that_is_longer_than_a_part_is_read_to_its_start(
    api: httpx.Client, paths: RunPaths
) -> None:
    """A progress bar writes one line for hours."""
    log = paths.attempt(3).rank_log(0, 2, 0)
    make_directory(log.parent)
    name = log.relative_to(paths.directory).as_posix()
    line = "begin" + "=" * 90 + "end\n"
    try:
        log.write_text(line)
        parts: list[str] = []
        before = None
        while before != 0:
            # Each part must lead to an earlier one.
            assert len(parts) < 10
            at: dict[str, int] = {} if before is None else {"before": before}
            part = get(api, "/part", file=name, limit=20, **at)
            parts.insert(0, part["text"])
            before = part["offset"]
        assert "".join(parts) == line
    finally:
        log.unlink()


@pytest.mark.parametrize("size", [200 * MEGABYTE, 10 * 1024 * MEGABYTE])
def test_a_request_to_a_large_log_is_bounded(
    api: httpx.Client, paths: RunPaths, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is sparse: its size is real, its disk use is not."""
    log = paths.attempt(3).rank_log(0, 2, 0)
    make_directory(log.parent)
    monkeypatch.setattr(log_search, "SEARCH_BYTES_MAX", 8 * MEGABYTE)
    name = log.relative_to(paths.directory).as_posix()
    try:
        log.write_text("first line\n")
        os.truncate(log, size)
        with open(log, "ab") as file:
            file.write(b"\nthe last error\n")
        began = time.monotonic()
        answer = get(api, "/search", text="nowhere", file=name)
        assert answer["searched_bytes"] <= 9 * MEGABYTE
        assert answer["next"] == f"{answer['searched_bytes']}:{name}"
        near = f"{size - MEGABYTE}:{name}"
        (found,) = get(api, "/search", text="last error", file=name, after=near)["matches"]
        assert found["offset"] == size + 1
        assert get(api, "/part", file=name)["text"].endswith("the last error\n")
        assert get(api, "/part", file=name, offset=0, limit=11)["text"] == "first line\n"
        assert time.monotonic() - began < 60
        with api.stream("GET", "/api/v1/runs/gpt/log-files/download", params={"file": name}) as got:
            assert next(got.iter_bytes()).startswith(b"first line\n")
    finally:
        log.unlink()


def test_a_folder_that_is_a_link_lists_nothing(
    api: httpx.Client, paths: RunPaths, tmp_path: Path
) -> None:
    (tmp_path / "rank-00000.stdout.log").write_text("elsewhere\n")
    link = paths.attempt(3).node_logs(0) / "l07"
    link.symlink_to(tmp_path)
    try:
        assert 7 not in {one["launch"] for one in get(api, "")}
        assert find_all(api, text="elsewhere")[0] == []
    finally:
        link.unlink()
