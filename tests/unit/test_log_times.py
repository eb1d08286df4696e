"""The times of the ranks' output: what the agent records, and what is read back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.disk.rank_logs import TIMES, RankLog, rank_logs
from holdfast.workers.agent.watch import heartbeat
from holdfast.workers.agent.watch.heartbeat import LogTimes


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    made = RunPaths(tmp_path / "run").attempt(1)
    for launch in (1, 2):
        made.rank_log(0, launch, 0).parent.mkdir(parents=True)
    return made


def logs(attempt: AttemptPaths) -> list[RankLog]:
    return sorted(rank_logs(attempt, on_skip=lambda error: None), key=lambda one: one.launch)


def test_each_growth_of_a_log_is_recorded_once(attempt: AttemptPaths) -> None:
    first, second = (attempt.rank_log(0, launch, 0) for launch in (1, 2))
    times, began = LogTimes(attempt, 0), time.time()
    times.look(0)
    first.write_text("a line\n")
    times.look(1)
    times.look(1)
    first.write_text("a line\nand another\n")
    second.write_text("x")
    # The end of a launch is recorded when the next one is seen.
    times.look(2)
    one, other = logs(attempt)
    assert [size for size, _ in one.times()] == [7, 19]
    assert [size for size, _ in other.times()] == [1]
    assert all(began - 0.001 <= at <= time.time() for log in (one, other) for _, at in log.times())


def test_a_long_launch_is_recorded_once_a_minute_and_at_its_end(
    attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "FINE_S", 0.0)
    times, path = LogTimes(attempt, 0), attempt.rank_log(0, 1, 0)
    for size in (10, 20, 30):
        path.write_text("x" * size)
        times.look(1)
    assert [size for size, _ in logs(attempt)[0].times()] == [10]
    times.look(1, is_last=True)
    assert [size for size, _ in logs(attempt)[0].times()] == [10, 30]


def test_a_foreign_or_damaged_file_of_times_gives_none(attempt: AttemptPaths) -> None:
    path = attempt.rank_log(0, 1, 0)
    path.write_text("x")
    (log,) = logs(attempt)
    assert log.times() == []
    times = path.with_name(TIMES)
    times.write_bytes(b"\xff\n12.5 rank-00000.stdout.log 7\n1.000 other 9\n" + b"9" * 99 + b"\n")
    assert log.times() == []
    times.unlink()
    times.symlink_to("/etc/passwd")
    assert log.times() == []
