"""Symptoms of the page on troubleshooting: the place that it names has the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.support.histories import spec_of
from tests.unit.test_cli import ended_run

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.records.documents import write_document
from holdfast.contracts.records.history import load_events
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.launch import warm_standby
from holdfast.workers.agent.launch.warm_standby import StandbyPlan
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.runs import attempts, run_folders
from holdfast.workers.runs.request import build_request

__all__ = ["ended_run"]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    spec = spec_of()
    paths, _ = run_folders.attach_or_create(spec, tmp_path, created_by="tester")
    made = attempts.reserve(paths, 1)
    assert made is not None
    record = run_folders.read_record(paths)
    write_document(made.request, build_request(record, spec, attempt=1, gpus=4, reason="x"))
    return made


def notes_of(paths: RunPaths) -> list[str]:
    return [event.data["text"] for event in load_events(paths) if event.kind is EventKind.NOTE]


def test_a_note_says_that_memory_is_too_little_for_a_standby(
    attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_standby, "has_memory_for", lambda _: False)
    runtime = NodeRuntime(load_context(attempt.request))
    try:
        runtime.prepare(2, "127.0.0.1", 1)
    finally:
        runtime.close()
    assert notes_of(RunPaths(attempt.directory.parent.parent)) == [
        "no warm standby: the node has too little memory for one"
    ]


def test_a_note_names_the_variables_that_keep_a_standby_from_starting(
    attempt: AttemptPaths,
) -> None:
    notes: list[str] = []
    plan = StandbyPlan(load_context(attempt.request), lambda: "127.0.0.1", notes.append)
    plan.take_port(1, [], [])
    # A program without a `Session` has no such event, and no note.
    assert not plan._may_load_ahead()
    assert notes == []
    with JournalWriter(attempt.rank_journal) as journal:
        journal.append(
            EventKind.RESUMED, attempt=1, launch=1, step=0, changed_variables=["OMP_NUM_THREADS"]
        )
    assert not plan._may_load_ahead()
    assert notes == ["no warm standby: the program itself sets OMP_NUM_THREADS"]


def test_checkpoints_lists_how_long_each_save_took(call: Call, ended_run: RunPaths) -> None:
    listed = call("checkpoints", "kelp", "--json").json
    assert [(one["flush_s"], one["blocked_s"]) for one in listed] == [(0.2, 0.01)] * 2
