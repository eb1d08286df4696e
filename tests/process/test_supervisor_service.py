"""`holdfast supervise --stay`: one real process that supervises all runs under a root."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.local_runs import PROGRAM, LocalRun, wait_until
from tests.support.forked import RANK_FORKS

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.supervision import is_supervised
from holdfast.flows.start import start_here
from holdfast.flows.supervisor.flow_lock import hand_over, service_folder

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""
# The longest time without a supervisor.
RESUMED_S = 15.0


class Services:
    """Starts services and calls commands, with a home and a root of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "runs"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "PREFECT_"))}
        given = {"HOLDFAST_HOME": str(folder / "home"), "HOLDFAST_ROOT": str(self.root)}
        self.environment = {**clean, **given}

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [HOLDFAST, "supervise", "--stay"],
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert "supervising your runs under" in process.stderr.readline()
        return process

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        process = self.start()
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def call(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [HOLDFAST, *words], env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def submit(self, spec: Path) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.call("submit", str(spec), "--json").stdout)
        return facts


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(tmp_path)


def write_spec(folder: Path, name: str, steps: int, sleep_s: float) -> Path:
    path = folder / f"{name}.yaml"
    spec = {
        "name": name,
        "command": [PROGRAM.name, json.dumps({"steps": steps, "sleep_s": sleep_s})],
        "launch": {"working_directory": str(PROGRAM.parent)},
        "resources": {"executor": "local", "gpus_per_node": 1},
        "environment": {"PYTHONPATH": str(RANK_FORKS)},
        "checkpoint": {"interval": 10},
        "supervision": {"poll_s": 0.5, "heartbeat_s": 0.3, "standby_after_s": "off"},
    }
    path.write_text(json.dumps(spec))
    return path


def supervisors(paths: RunPaths) -> list[int]:
    """The processes that have taken up the run, the newest last."""
    if not paths.spec.is_file():
        return []
    events = load_history(paths).events
    return [event.data["pid"] for event in events if event.kind is EventKind.SUPERVISED]


def has_ended(paths: RunPaths) -> bool:
    return not load_history(paths).state.is_live


def end_job(paths: RunPaths) -> None:
    """End the processes of the run's last attempt."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(paths.directory) in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_service_supervises_submitted_runs_and_survives_its_own_death(
    services: Services, tmp_path: Path
) -> None:
    short, long = (RunPaths(services.root / name) for name in ("short", "long"))
    try:
        with services.running() as first:
            for name, steps, sleep_s in (("short", 10, 0.0), ("long", 600, 0.1)):
                facts = services.submit(write_spec(tmp_path, name, steps, sleep_s))
                # None: the service saw the run before the command asked it to take the run up.
                told = facts["service"]
                assert told is None or told.startswith(f"process {first.pid} on ")
                assert facts["pid"] is None
            wait_until(lambda: has_ended(short), "the end of the short run", 90)
            assert load_history(short).state == "completed"
            wait_until(
                lambda: "short completed" in short.flow_log.read_text(), "its log's last line"
            )
            wait_until(lambda: load_history(long).attempts, "the attempt")
            assert supervisors(long) == [first.pid]
            assert "already" in services.call("supervise", "--stay", status=5).stderr
        killed_at = time.monotonic()
        assert not is_supervised(long.flow_lock)
        with services.running() as second:
            wait_until(lambda: supervisors(long) == [first.pid, second.pid], "supervision", 60)
            assert time.monotonic() - killed_at < RESUMED_S
            services.call("cancel", "long")
            wait_until(lambda: has_ended(long), "the end of the long run", 90)
            assert len(load_history(long).attempts) == 1, "the job was not disturbed"
            second.send_signal(signal.SIGTERM)
            assert second.wait(10) == 0
    finally:
        end_job(long)


@pytest.mark.slow
def test_service_takes_up_a_run_whose_supervisor_was_killed(services: Services) -> None:
    run = LocalRun(services.root, steps=600, sleep_s=0.1, supervision={"poll_s": 0.5})
    try:
        started = start_here(run.paths)
        assert started.process is not None
        wait_until(lambda: supervisors(run.paths), "the first supervisor")
        with services.running() as service:
            time.sleep(7)
            assert supervisors(run.paths) == [started.process.pid], "it has a supervisor"
            started.process.kill()
            started.process.wait()
            killed_at = time.monotonic()
            wait_until(lambda: supervisors(run.paths)[1:] == [service.pid], "supervision", 60)
            assert time.monotonic() - killed_at < RESUMED_S
    finally:
        run.end_all()


def test_no_service_of_another_user_is_trusted(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    assert hand_over(paths) == ""
    folder = service_folder(tmp_path)
    (folder / "wanted").mkdir(parents=True)
    (folder / "lock").write_text("process 1 on here")
    (folder / "lock").chmod(0o600)
    assert hand_over(paths) == "", "nobody holds the lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder / "lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert hand_over(paths) == "process 1 on here"
        assert [path.name for path in (folder / "wanted").iterdir()] == ["run"]
        os.chown(folder, 54_321, -1)
        assert hand_over(paths) == ""
    finally:
        holder.kill()
        holder.communicate()
