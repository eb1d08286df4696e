"""Processes of this machine, named so that a reused process id is not mistaken for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

# The unit of start times. The start after boot does not change when the clock is set. psutil adds
# the boot time, which does.
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_START_FIELD: Final = 19
TERM_WAIT_S: Final = 3.0
# After so many rounds without a new process, all are stopped.
STOP_ROUNDS: Final = 2
STOP_WAIT_S: Final = 0.02
KILL_WAIT_S: Final = 10.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessName:
    """A permanent name of one process: its id, its start (seconds after boot) and the boot."""

    pid: int
    start_s: float
    boot_id: str


def boot_id() -> str:
    """Return the id of this boot of the machine, or '' if Linux gives none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def name_process(pid: int) -> ProcessName | None:
    """Return the permanent name of the process that now has id `pid`, or None if there is none."""
    try:
        return ProcessName(pid, start_s(pid), boot_id())
    except ProcessLookupError:
        return None


def start_s(pid: int) -> float:
    """Return when process `pid` started, in seconds after boot. Setting the clock keeps it.

    Raises `ProcessLookupError` if there is no such process.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The name is in brackets and may contain anything. The fields after it do not.
    return int(status.rpartition(b")")[2].split()[_START_FIELD]) / TICKS_PER_S


def find_process(name: ProcessName) -> psutil.Process | None:
    """Return the process called `name` if it still runs on this boot of this machine."""
    # Process ids and start times start over at each boot.
    if name.boot_id != boot_id():
        return None
    try:
        process = psutil.Process(name.pid)
        # Half a tick, because the difference of two floats can be a little less than one tick.
        same = abs(start_s(name.pid) - name.start_s) < 0.5 / TICKS_PER_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def is_alive(name: ProcessName) -> bool:
    """Return True while the process called `name` runs; a zombie does not run."""
    return find_process(name) is not None


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return every process below `process`, including those in other sessions."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_processes(
    processes: Iterable[psutil.Process], *, term_wait_s: float = TERM_WAIT_S
) -> list[int]:
    """Send TERM, wait, send KILL, wait; return the ids of the processes that are still alive.

    What the processes left after TERM have started meanwhile is killed, too.
    """
    alive = [p for p in processes if p.pid != os.getpid()]
    if term_wait_s > 0:
        for process in alive:
            _send(process, signal.SIGTERM)
        alive = _wait(alive, term_wait_s)
    alive = _stop_with_all_below(alive)
    for process in alive:
        _send(process, signal.SIGKILL)
    return [p.pid for p in _wait(alive, KILL_WAIT_S)]


def _stop_with_all_below(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Stop the processes and all below them, so that none can start another; return them all."""
    found, quiet_rounds = {process.pid: process for process in processes}, 0
    give_up = time.monotonic() + KILL_WAIT_S
    while found and quiet_rounds < STOP_ROUNDS and time.monotonic() < give_up:
        for process in found.values():
            _send(process, signal.SIGSTOP)
        # A process that has just begun to start another one may still do so.
        time.sleep(STOP_WAIT_S)
        others = (p for p in psutil.process_iter(["ppid"]) if p.pid not in {os.getpid(), *found})
        new = [p for p in others if p.info["ppid"] in found]
        found |= {process.pid: process for process in new}
        quiet_rounds = 0 if new else quiet_rounds + 1
    return list(found.values())


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        # psutil compares the start time first, so a reused id is left alone.
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _wait(processes: list[psutil.Process], wait_s: float) -> list[psutil.Process]:
    give_up = time.monotonic() + wait_s
    _, alive = psutil.wait_procs(processes, timeout=wait_s)
    while alive and time.monotonic() < give_up:
        time.sleep(0.05)
        alive = [p for p in alive if p.is_running()]
    return [p for p in alive if _runs(p)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
