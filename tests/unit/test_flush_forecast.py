"""How long the last flush will take, when a stop starts, and whether a grace is long enough."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import record_of, spec_of

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import create_document
from holdfast.contracts.states import Cause
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.stops.sources import FORECAST_POLL_S, LIMIT_POLL_S, FlushLog, StopWatch
from holdfast.workers.decisions.grace import (
    FlushForecast,
    forecast_flush,
    grace_of_partition,
    grace_of_qos,
    grace_warnings,
    stop_lead_s,
    warnings_of,
)
from holdfast.workers.runs.request import build_request


def line(kind: EventKind, **data: Any) -> Event:
    return Event(writer="w", opening=1, sequence=0, time=0.0, kind=kind, data=data)


def saves(*pairs: tuple[Any, Any]) -> list[Event]:
    """Staged and committed lines of saves that blocked and flushed for so many seconds."""
    lines = []
    for number, (blocked, flush) in enumerate(pairs):
        lines.append(line(EventKind.STAGED, checkpoint=f"c{number}", blocked_s=blocked))
        lines.append(line(EventKind.COMMITTED, checkpoint=f"c{number}", flush_s=flush))
    return lines


def test_a_snapshot_committed_after_a_crash_is_not_in_the_forecast() -> None:
    lines = [*saves((1.0, 5.0)), line(EventKind.COMMITTED, checkpoint="crash", flush_s=35.9)]
    assert forecast_flush(lines) == FlushForecast(seconds=6.0, saves=1)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], None),
        ([(1.0, 5.0)], FlushForecast(seconds=6.0, saves=1)),
        ([(1.0, 5.0), (0.5, 9.0), (0.5, 2.0)], FlushForecast(seconds=9.5, saves=3)),
        ([(0.0, 99.0), *[(0.0, 1.0)] * 10], FlushForecast(seconds=1.0, saves=10)),
        ([("x", None), (None, float("nan")), (True, -3.0)], None),
    ],
)
def test_the_forecast_is_the_slowest_recent_save(
    pairs: list[tuple[Any, Any]], expected: FlushForecast | None
) -> None:
    assert forecast_flush(saves(*pairs)) == expected


@pytest.mark.parametrize(
    ("seconds", "step_s", "expected"),
    [(None, 0.0, 40.0), (8.0, 0.0, 20.0), (80.0, 0.0, 110.0), (8.0, 5.0, 30.0), (8.0, 1e6, 620.0)],
)
def test_the_stop_lead_time_follows_the_forecast(
    seconds: float | None, step_s: float, expected: float
) -> None:
    forecast = None if seconds is None else FlushForecast(seconds=seconds, saves=1)
    assert stop_lead_s(forecast, grace_s=30.0, step_s=step_s) == expected


@pytest.mark.parametrize(
    ("seconds", "given_s", "words"),
    [
        (None, None, []),
        (24.0, None, []),
        (24.1, None, ["30 s is too short"]),
        (10.0, 12.0, ["gives a preempted job 12 s", "12 s is too short"]),
        (None, 12.0, ["gives a preempted job 12 s"]),
        (None, 0.0, ["spot gives a preempted job no grace (GraceTime=0), only Slurm's KillWait"]),
        (1.0, 60.0, []),
    ],
)
def test_a_grace_that_is_too_short_gives_warnings(
    seconds: float | None, given_s: float | None, words: list[str]
) -> None:
    forecast = None if seconds is None else FlushForecast(seconds=seconds, saves=3)
    said = grace_warnings(forecast, grace_s=30.0, giver="partition spot", given_s=given_s)
    assert len(said) == len(words)
    assert all(part in text for part, text in zip(words, said, strict=True))


def test_the_grace_of_a_partition() -> None:
    partitions = [
        {"PartitionName": "prod", "PreemptMode": "OFF", "GraceTime": "0", "Default": "YES"},
        {"PartitionName": "spot", "PreemptMode": "CANCEL", "GraceTime": "30", "Default": "NO"},
    ]
    assert grace_of_partition(partitions, "spot") == ("spot", 30.0)
    assert grace_of_partition(partitions, None) == ("prod", None)
    assert grace_of_partition(partitions, "night") == ("", None)
    # The job may run in either, so the shorter grace counts.
    partitions += [{"PartitionName": "cheap", "PreemptMode": "REQUEUE", "GraceTime": "5"}]
    assert grace_of_partition(partitions, "spot,cheap") == ("cheap", 5.0)
    assert grace_of_partition(partitions, "prod,spot") == ("spot", 30.0)


def test_the_grace_of_a_qos() -> None:
    known = {
        "high": ("00:10:00", "low,none,odd"),
        "low": ("00:00:30", ""),
        "none": ("00:00:00", ""),
        "odd": ("", ""),
    }
    found = {name: grace_of_qos(known, name) for name in (*known, "", "unknown")}
    assert found == {
        "high": None,
        "low": 30.0,
        "none": 0.0,
        "odd": None,
        "": None,
        "unknown": None,
    }


def context_of(root: Path, limit_min: int) -> AgentContext:
    spec = spec_of(resources={"time_limit_min": limit_min})
    record = record_of(spec).model_copy(update={"root": str(root)})
    run = RunPaths(root / record.run)
    request = build_request(record, spec, attempt=2, gpus=1, reason="test")
    make_directory(run.directory)
    create_document(run.spec, record)
    return AgentContext(
        request=request,
        run=run,
        attempt=run.attempt(2),
        node=0,
        nodes=1,
        job_id="1",
        host="here",
        started_at=time.time(),
    )


def test_the_stop_time_follows_the_flushes_of_this_and_earlier_attempts(tmp_path: Path) -> None:
    context = context_of(tmp_path, limit_min=60)
    stops = StopWatch(context, lambda: 1.0)
    assert stops.end_at is not None
    with JournalWriter(context.run.attempt(1).rank_journal) as journal:
        journal.append(EventKind.STAGED, attempt=1, checkpoint="c")
        journal.append(EventKind.COMMITTED, attempt=1, checkpoint="c", flush_s=40.0)
    stops.look_at_saves(now=stops.end_at - 1000.0)
    # 1.25 x 40 s, two steps, the margin, and the time between two polls; then the same with 80 s.
    first_s, second_s = 50.0 + 2.0 + 10.0 + LIMIT_POLL_S, 100.0 + 2.0 + 10.0 + LIMIT_POLL_S
    with JournalWriter(context.attempt.rank_journal) as journal:
        journal.append(EventKind.STAGED, attempt=2, checkpoint="d")
        journal.append(EventKind.COMMITTED, attempt=2, checkpoint="d", flush_s=80.0)
    assert stops.from_limit(stops.end_at - second_s) is None
    # A second look is due after a tenth of the time that is left, and no sooner.
    stops.look_at_saves(now=stops.end_at - 1000.0 + FORECAST_POLL_S)
    assert stops.from_limit(stops.end_at - second_s + LIMIT_POLL_S) is None
    stops.look_at_saves(now=stops.end_at - 900.0)
    stop_request = stops.from_limit(stops.end_at - second_s + 2 * LIMIT_POLL_S)
    assert stop_request is not None
    assert second_s - 2 * LIMIT_POLL_S > first_s, "the first forecast would have stopped later"
    assert (stop_request.cause, stop_request.deadline) == (Cause.TIME_LIMIT, stops.end_at)
    (said,) = warnings_of(spec_of(), context.run)
    assert "the last 2 saves took 80.0 s" in said


@pytest.mark.parametrize(
    ("variables", "end_s"),
    [
        ({}, 3600.0),
        ({"SLURM_JOB_START_TIME": "900"}, 900 + 3600.0 - 1000),
        ({"SLURM_JOB_START_TIME": "900", "SLURM_JOB_END_TIME": "2000"}, 1000.0),
    ],
)
def test_the_time_limit_is_known_without_slurm_commands(
    variables: dict[str, str], end_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = context_of(tmp_path, limit_min=60)
    request = before.request.model_copy(update={"executor": "slurm"})
    stops = StopWatch(replace(before, request=request, started_at=1000.0), lambda: 1.0)
    assert stops.end_at == 1000.0 + end_s
    stop_request, judgement = stops.from_signal("SIGUSR2", heard_at=stops.end_at - 30)
    assert stop_request is None
    assert judgement.deadline == stops.end_at


def test_a_torn_line_is_skipped_and_read_once_it_is_complete(tmp_path: Path) -> None:
    context = context_of(tmp_path, limit_min=60)
    log = FlushLog(context.run, context.attempt)
    path = context.attempt.rank_journal
    path.parent.mkdir(parents=True)
    events = [*saves((0.0, 3.0), (0.0, 7.0))]
    lines = [event.model_dump_json() + "\n" for event in events]
    path.write_text("".join(lines[:3]) + lines[3][:40])
    assert log.forecast() == FlushForecast(seconds=3.0, saves=1)
    path.write_text("".join(lines))
    assert log.forecast() == FlushForecast(seconds=7.0, saves=2)
    assert log.forecast() == FlushForecast(seconds=7.0, saves=2)
