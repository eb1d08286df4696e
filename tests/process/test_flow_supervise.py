"""The supervisor without Prefect: real jobs of the local executor, real files, real outages."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import LineageError
from holdfast.contracts.records.history import RunHistory, load_events, load_history
from holdfast.contracts.records.supervision import is_supervised
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.supervisor.deliveries import Deliveries
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Ingestion, Supervisor
from holdfast.lineage.database.sqlite_file import URL_VARIABLE
from holdfast.lineage.index import Index
from holdfast.lineage.queries import run_queries
from holdfast.workers.decisions.policy import REFUSALS_MAX
from holdfast.workers.runs import operator
from holdfast.workers.runs.attempts import reserve
from holdfast.workers.runs.run_folders import create_run

WAIT_S = 180.0
LOG = logging.getLogger("holdfast.test")


def make_run(folder: Path, program: str, **more: Any) -> RunPaths:
    """A run of `program`, a script without Holdfast, on one rank."""
    (folder / "program.py").write_text(program)
    spec = {
        "name": "kelp",
        "command": ["program.py"],
        "launch": {"working_directory": str(folder)},
        "supervision": {"poll_s": 0.2, "heartbeat_s": 0.3, "backoff_s": 0.1},
        **more,
    }
    return create_run(RunSpec.model_validate(spec), folder / "runs", created_by="tester")


def supervise_in_thread(paths: RunPaths, index: Index) -> tuple[threading.Thread, Supervisor]:
    supervisor = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next)
    thread = threading.Thread(target=supervisor.run, daemon=True)
    thread.start()
    return thread, supervisor


def wait_for(what: str, is_so: Callable[[], Any]) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < ends_at, f"{what} did not happen within {WAIT_S} s"
        time.sleep(0.05)


def kinds(paths: RunPaths) -> list[str]:
    return [event.kind for event in load_events(paths)]


@pytest.mark.more
def test_supervisor_runs_a_job_to_its_end_and_indexes_it(tmp_path: Path, index: Index) -> None:
    paths = make_run(tmp_path, "print('hello')\n")
    history = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    assert history.state is RunState.COMPLETED
    assert kinds(paths).count(EventKind.DECISION) == 2
    assert kinds(paths).count(EventKind.RUN_ENDED) == 1
    shown = run_queries.show_run(index.open(), str(paths.directory))
    assert shown["state"] == "completed"
    again = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    assert len(again.attempts) == 1
    assert kinds(paths).count(EventKind.RUN_ENDED) == 1


@pytest.mark.more
def test_request_during_the_last_ingest_is_followed(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relaunch finds that the run has a supervisor, which is about to end, and starts none."""
    marker = tmp_path / "once"
    program = f"import os; os.path.exists({str(marker)!r}) or exit(1)\n"
    paths = make_run(tmp_path, program)
    finish = Ingestion.finish

    def finish_late(ingestion: Ingestion) -> None:
        if not marker.exists():
            marker.touch()
            assert is_supervised(paths.flow_lock)
            operator.request(paths, "relaunch", by="tester")
        finish(ingestion)

    monkeypatch.setattr(Ingestion, "finish", finish_late)
    history = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    assert [view.state for view in history.attempts] == [
        AttemptState.FAILED,
        AttemptState.COMPLETED,
    ]
    assert history.state is RunState.COMPLETED


@pytest.mark.more
def test_database_outage_does_not_stop_supervision(
    tmp_path: Path,
    index: Index,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = make_run(tmp_path, "import time; time.sleep(3)\n")
    index.open()
    file = tmp_path / "home" / "holdfast.db"
    thread, _ = supervise_in_thread(paths, index)
    wait_for("the job", lambda: bool(paths.list_attempts()))
    in_the_way = tmp_path / "in_the_way"
    in_the_way.write_text("no folder")
    with monkeypatch.context() as outage:
        outage.setenv(URL_VARIABLE, f"sqlite:///{in_the_way}/holdfast.db")
        file.rename(tmp_path / "away.db")
        with pytest.raises(LineageError):
            index.update(paths)
        thread.join(WAIT_S)
    assert not thread.is_alive()
    assert load_history(paths).state is RunState.COMPLETED
    assert caplog.text.count("the index was not updated") == 1
    for name in file.parent.glob("holdfast.db*"):
        name.unlink()
    with Index() as later:
        later.update(paths)
        assert run_queries.show_run(later.open(), str(paths.directory))["state"] == "completed"
    assert sqlite3.connect(file).execute("select count(*) from runs").fetchone() == (1,)


@pytest.mark.more
def test_second_supervisor_waits_until_the_first_is_gone(
    tmp_path: Path, index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    paths = make_run(tmp_path, "print('hello')\n")
    assert not is_supervised(paths.flow_lock)
    with FlowLock(paths.flow_lock) as lock:
        assert lock.try_take()
        assert is_supervised(paths.flow_lock)
        thread, supervisor = supervise_in_thread(paths, index)
        wait_for("the follower", lambda: "another supervisor acts on" in caplog.text)
        assert not supervisor.is_acting
        assert not paths.list_attempts()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert supervisor.is_acting
    assert load_history(paths).state is RunState.COMPLETED


def test_job_that_cannot_start_fails_with_the_launcher_output(tmp_path: Path, index: Index) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such environment >&2\nexit 3\n")
    python.chmod(0o755)
    paths = make_run(
        tmp_path,
        "",
        launch={"working_directory": str(tmp_path), "python": str(python)},
        supervision={"poll_s": 0.05, "backoff_s": 0.0, "budgets": {"infrastructure": 1}},
    )
    history = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    assert history.state is RunState.FAILED
    assert [a.state for a in history.attempts] == [AttemptState.FAILED] * 2
    assert history.attempts[0].cause is Cause.INFRASTRUCTURE
    (evidence,) = history.attempts[0].evidence
    assert f"refused the job {REFUSALS_MAX} times" in evidence
    assert "no such environment" in evidence


@pytest.mark.more
def test_the_wait_between_two_looks_is_that_of_the_spec(tmp_path: Path, index: Index) -> None:
    own = {"poll_s": 7.0, "heartbeat_s": 0.3}
    paths = make_run(tmp_path, "import time\ntime.sleep(2)\n", supervision=own)
    supervisor = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next)
    with supervisor._lock, JournalWriter(paths.journal_of("flow")) as journal:
        supervisor._turn(journal)
        assert supervisor._turn(journal) == 7.0
        wait_for("the end", lambda: supervisor._turn(journal) is None)


@pytest.mark.more
def test_attempt_reserved_by_a_dead_flow_is_replaced(tmp_path: Path, index: Index) -> None:
    paths = make_run(tmp_path, "print('hello')\n")
    # The flow died right after it had reserved an attempt number, before the request and the job.
    assert reserve(paths, 1) is not None
    history = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    assert [a.state for a in history.attempts] == [AttemptState.LOST, AttemptState.COMPLETED]
    assert history.state is RunState.COMPLETED


def test_a_paused_run_waits_and_a_cancelled_one_ends(tmp_path: Path, index: Index) -> None:
    paths = make_run(tmp_path, "print('hello')\n")
    operator.request(paths, "pause", by="tester")
    thread, _ = supervise_in_thread(paths, index)
    wait_for("the pause", lambda: EventKind.DECISION in kinds(paths))
    time.sleep(1.0)
    assert load_history(paths).state is RunState.PAUSED
    assert kinds(paths).count(EventKind.DECISION) == 1
    assert not paths.list_attempts()
    operator.request(paths, "cancel", by="tester")
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert load_history(paths).state is RunState.CANCELLED
    assert run_queries.show_run(index.open(), str(paths.directory))["state"] == "cancelled"


@pytest.mark.more
def test_locked_database_delays_no_decision(tmp_path: Path, index: Index) -> None:
    paths = make_run(tmp_path, "print('hello')\n")
    index.open()
    other = sqlite3.connect(tmp_path / "home" / "holdfast.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        thread, _ = supervise_in_thread(paths, index)
        wait_for("the run's end", lambda: EventKind.RUN_ENDED in kinds(paths))
        assert other.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    finally:
        other.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert run_queries.show_run(index.open(), str(paths.directory))["state"] == "completed"


@pytest.mark.more
def test_a_relaunch_while_the_supervisor_leaves_keeps_it(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command sees a supervisor and starts none, so that one must not leave."""
    paths = make_run(tmp_path, "raise SystemExit(3)\n")
    was_supervised: list[bool | None] = []
    finish = Deliveries.finish

    def relaunch(deliveries: Deliveries, history: RunHistory) -> None:
        finish(deliveries, history)
        if not was_supervised:
            operator.request(paths, "relaunch", by="tester")
            was_supervised.append(is_supervised(paths.flow_lock))

    monkeypatch.setattr(Deliveries, "finish", relaunch)
    history = Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    assert was_supervised == [True]
    assert len(history.attempts) == 2


@pytest.mark.more
def test_a_relaunch_after_the_supervisor_has_left_finds_none(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order waits for the leaving supervisor, so its command does not see that one's lock."""
    paths = make_run(tmp_path, "raise SystemExit(3)\n")
    was_supervised: list[bool | None] = []

    def relaunch() -> None:
        operator.request(paths, "relaunch", by="tester")
        was_supervised.append(is_supervised(paths.flow_lock))

    thread = threading.Thread(target=relaunch)
    release = FlowLock.release

    def release_late(lock: FlowLock) -> None:
        if not thread.ident:
            thread.start()
            time.sleep(1.0)
        release(lock)

    monkeypatch.setattr(FlowLock, "release", release_late)
    Supervisor(paths=paths, index=index, log=LOG, submit=submit_next).run()
    thread.join(WAIT_S)
    assert was_supervised == [False]
    assert load_history(paths).state is RunState.WAITING
