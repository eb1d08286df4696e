"""Permanent names of processes: neither a reused id nor a set clock confuses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.workers.nodes import processes
from holdfast.workers.nodes.processes import (
    TICKS_PER_S,
    ProcessName,
    end_processes,
    find_process,
    is_alive,
    name_process,
    start_s,
)


@pytest.mark.parametrize("step_s", [-600, 600, 3])
def test_a_process_keeps_its_name_when_the_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """Linux computes the boot time, from which psutil derives start times, by the clock."""
    name = name_process(os.getpid())
    assert name is not None
    real = psutil.boot_time() + step_s
    before = psutil.Process().create_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: real)
    after = psutil.Process().create_time()
    assert after - before == pytest.approx(step_s, abs=1)
    assert is_alive(name)
    assert name_process(os.getpid()) == name


def test_another_process_with_the_same_id_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = name_process(os.getpid())
    assert name is not None
    assert find_process(ProcessName(name.pid, name.start_s, "another boot")) is None
    for tick in range(1, 2000):
        starts_s = tick / TICKS_PER_S
        monkeypatch.setattr(processes, "start_s", lambda _, starts_s=starts_s: starts_s)
        before = ProcessName(name.pid, (tick - 1) / TICKS_PER_S, name.boot_id)
        assert find_process(before) is None, f"it started one tick later, after {tick} ticks"
        assert find_process(ProcessName(name.pid, starts_s, name.boot_id)) is not None


def test_an_ended_process_has_no_name() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    name = name_process(child.pid)
    child.wait(60)
    assert name is not None
    assert not is_alive(name)
    assert name_process(child.pid) is None
    with pytest.raises(ProcessLookupError):
        start_s(child.pid)


# Starts processes in sessions of their own until it is killed.
STARTER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
started = [sys.executable, "-S", "-c", "import time; time.sleep(60)", sys.argv[1]]
while True:
    subprocess.Popen(started, start_new_session=True)
    time.sleep(0.01)
"""


def test_processes_that_start_until_the_kill_are_ended_too(tmp_path: Path) -> None:
    mark = str(tmp_path)
    with subprocess.Popen([sys.executable, "-c", STARTER, mark], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        starter.stdout.readline()
        assert end_processes([psutil.Process(starter.pid)], term_wait_s=0.3) == []
    running = [one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"])]
    assert not [words for words in running if mark in words]
