"""The record of logins: complete for users, and bounded for everyone who reaches the port."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Served

from holdfast.api import sessions
from holdfast.api.sessions import OTHER_ADDRESSES, SessionAudit

FAILURES = 200


def lines(home: Path) -> list[dict[str, Any]]:
    text = (home / "journal" / "api.jsonl").read_text()
    return [json.loads(line)["data"] for line in text.splitlines()]


def test_failed_logins_are_one_line_and_a_count(served: Served) -> None:
    with served.stranger() as client:
        for _ in range(FAILURES):
            client.get("/", params={"token": "x"}, follow_redirects=False)
        statuses = [
            client.post("/api/v1/session", json={"token": "x"}).status_code for _ in range(FAILURES)
        ]
    assert set(statuses) == {429}
    assert len(lines(served.home)) == 2, "the first refusal, and the first throttled one"
    with served.stranger() as client:
        done = client.post("/api/v1/session", json={"token": served.token})
    assert done.status_code == 200
    served.services.session_audit.flush()
    seen = lines(served.home)
    assert [one["outcome"] for one in seen[:3]] == ["refused: 401", "refused: 429", "done"]
    assert {one["count"] for one in seen[3:]} == {9, 2 * FAILURES - 11}
    assert {one["address"] for one in seen} == {"127.0.0.1"}


def test_many_addresses_share_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    audit = SessionAudit()
    for number in range(10_000):
        audit.refused(f"10.0.{number // 256}.{number % 256}", 401)
    audit.flush()
    seen = lines(tmp_path)
    assert len(seen) == sessions.AUDITED_ADDRESSES_MAX + 1
    others = {"address": OTHER_ADDRESSES, "count": 10_000 - sessions.AUDITED_ADDRESSES_MAX}
    assert others.items() <= seen[-1].items()


def test_the_count_is_written_after_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setattr(sessions, "AUDIT_WINDOW_S", 0.2)
    audit = SessionAudit()
    for _ in range(3):
        audit.refused("10.0.0.1", 401)
    assert audit._timer is not None
    audit._timer.join(30)
    assert [one.get("count") for one in lines(tmp_path)] == [None, 2]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setattr(sessions, "AUDIT_BYTES_MAX", 2000)
    audit = SessionAudit()
    for number in range(100):
        audit.record("log in", "10.0.0.1", outcome="done", by=f"user {number}")
    sizes = {one.name: one.stat().st_size for one in (tmp_path / "journal").glob("api*")}
    assert sizes.keys() == {"api.jsonl", "api.1.jsonl"}
    assert max(sizes.values()) < 2500
    assert lines(tmp_path)[-1]["by"] == "user 99", "the newest lines stay"


def test_a_last_event_id_of_other_digits_resets_the_stream(served: Served) -> None:
    boot = served.services.hub._boot
    for text in (f"{boot}-²", "abc-²", f"{boot}-", f"{boot}-{'9' * 80}"):
        headers = {b"Last-Event-ID": text.encode("latin-1")}
        with (
            served.client() as client,
            client.stream("GET", "/api/v1/events", headers=headers) as answer,
        ):
            assert answer.status_code == 200
            assert next(answer.iter_lines()) == "event: reset"
