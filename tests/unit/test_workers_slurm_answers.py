"""Answers of Slurm that supervisors share: how often Slurm is asked, and what each of them sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import T0, RunFolder

from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError
from holdfast.contracts.records.documents import Outcome, write_document
from holdfast.contracts.states import AttemptState
from holdfast.workers.runs.endings import JOB_ENDS_S, observe
from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers import slurm_client as slurm_answers
from holdfast.workers.schedulers.base import JobStatus
from holdfast.workers.schedulers.local import LocalExecutor
from holdfast.workers.schedulers.slurm_client import listed_jobs, shared_call

ROWS = (
    "17|RUNNING|None|n[1-2]|2026-03-01T10:00:00|2026-03-01T12:00:00|n1|holdfast-gpt-a0001",
    "18|PENDING|Priority||2026-03-01T11:00:00|N/A|n/a|another|name",
    "a line of another form",
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that makes a fake `squeue`; it returns the file with a line for each call."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    calls = tmp_path / "calls"
    calls.touch()

    def make(script: str) -> Path:
        (tmp_path / "squeue").write_text(f"#!/bin/sh\necho x >>{calls}\n{script}\n")
        (tmp_path / "squeue").chmod(0o755)
        return calls

    return make


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def test_jobs_are_read_from_one_answer_for_all_processes(slurm: Callable[..., Path]) -> None:
    calls = slurm("sleep 0.2\n" + "\n".join(f"echo '{row}'" for row in ROWS))
    program = (
        "from holdfast.workers.schedulers.slurm_client import listed_jobs as jobs\n"
        "print([(j.job_id, j.name, j.state, j.nodes, j.fields['BatchHost']) "
        "for j in jobs(age_s=60.0).values()])"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    told = {process.communicate(timeout=60)[0] for process in started}
    rows = [
        ("17", "holdfast-gpt-a0001", "RUNNING", "n[1-2]", "n1"),
        ("18", "another|name", "PENDING", "", ""),
    ]
    assert told == {f"{rows}\n"}
    assert count(calls) == 1
    assert listed_jobs(age_s=60.0)["17"].started_at == slurm_client.parse_time(
        "2026-03-01T10:00:00"
    )
    assert count(calls) == 1


def test_an_old_answer_is_replaced_and_another_cluster_has_its_own(
    slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is, the controller does not count as slow.
    monkeypatch.setattr(slurm_answers, "LOAD_MAX", 1e6)
    calls = slurm("echo answer")
    assert shared_call(["squeue"], age_s=60.0) == "answer\n"
    assert shared_call(["squeue"], age_s=60.0) == "answer\n"
    assert count(calls) == 1
    time.sleep(0.1)
    shared_call(["squeue"], age_s=0.05)
    assert count(calls) == 2
    monkeypatch.setenv("SLURM_CONF", "/etc/other/slurm.conf")
    shared_call(["squeue"], age_s=60.0)
    assert count(calls) == 3


def test_a_slow_controller_is_asked_less_often(slurm: Callable[..., Path]) -> None:
    calls = slurm("sleep 0.5; echo slow")
    for _ in range(3):
        shared_call(["squeue"], age_s=0.0)
    # It took half a second, so the answer counts for five.
    assert count(calls) == 1


def test_news_are_asked_for_once_and_not_of_a_slow_controller(
    slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = slurm("echo answer")
    with monkeypatch.context() as patch:
        patch.setattr(slurm_answers, "LOAD_MAX", 1e6)
        shared_call(["squeue"], age_s=60.0)
        now = time.time()
        shared_call(["squeue"], age_s=60.0, since=now + 60.0)
        assert count(calls) == 1
        for _ in range(3):
            shared_call(["squeue"], age_s=60.0, since=now)
        assert count(calls) == 2
    slurm("sleep 0.5; echo slow")
    shared_call(["squeue", "-a"], age_s=60.0)
    shared_call(["squeue", "-a"], age_s=60.0, since=time.time())
    assert count(calls) == 3


def test_the_end_of_an_attempt_is_a_time_of_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = RunFolder(tmp_path, "gpt", "a" * 32).submit(1, 2, at=T0)
    asked = []

    def status(*_: Any, since: float = 0.0) -> JobStatus:
        asked.append(since)
        return JobStatus(state=AttemptState.RUNNING, raw="COMPLETING")

    monkeypatch.setattr(LocalExecutor, "status", status)
    observe(attempt)
    outcome = Outcome(
        state=AttemptState.CANCELLED, job_id="101", world_size=2, started_at=T0, ended_at=T0 + 50
    )
    write_document(attempt.outcome, outcome)
    observe(attempt)
    assert asked == [0.0, T0 + 50 + JOB_ENDS_S]


def test_an_error_is_shared_too(slurm: Callable[..., Path]) -> None:
    calls = slurm("echo 'Unable to contact slurm controller' >&2; exit 1")
    for _ in range(2):
        with pytest.raises(SchedulerUnavailableError, match="cannot reach Slurm"):
            shared_call(["squeue"], age_s=60.0)
    assert count(calls) == 1
    slurm("echo 'invalid user' >&2; exit 1")
    with pytest.raises(SchedulerError, match="invalid user") as refused:
        shared_call(["squeue", "-x"], age_s=60.0)
    assert not isinstance(refused.value, SchedulerUnavailableError)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"asked_at": 1}', b'{"asked_at": 9e99, "took_s": 0, "output": "future"}'],
)
def test_a_damaged_answer_is_asked_again(slurm: Callable[..., Path], content: bytes) -> None:
    calls = slurm("echo answer")
    shared_call(["squeue"], age_s=60.0)
    (place,) = Path(os.environ["HOLDFAST_HOME"]).glob("slurm-*/*.json")
    place.write_bytes(content)
    assert shared_call(["squeue"], age_s=60.0) == "answer\n"
    assert count(calls) == 2
    assert json.loads(place.read_bytes())["output"] == "answer\n"


def test_without_a_usable_home_slurm_is_asked_directly(slurm: Callable[..., Path]) -> None:
    calls = slurm("echo answer")
    Path(os.environ["HOLDFAST_HOME"]).write_text("a file, not a folder")
    for _ in range(2):
        assert shared_call(["squeue"], age_s=60.0) == "answer\n"
    assert count(calls) == 2


@pytest.mark.more
def test_a_process_that_asks_for_too_long_is_reported(
    slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_answers, "LOCK_S", 0.2)
    calls = slurm("sleep 3; echo late")
    thread = threading.Thread(target=lambda: shared_call(["squeue"], age_s=60.0))
    thread.start()
    give_up = time.monotonic() + 30.0
    while not count(calls):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    with pytest.raises(SchedulerUnavailableError, match="another process has asked Slurm"):
        shared_call(["squeue"], age_s=60.0)
    thread.join(30)
