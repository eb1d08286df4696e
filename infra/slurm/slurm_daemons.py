"""Functions that start, find, wait for and end a test cluster's processes."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from slurm_errors import DaemonError

POLL_INTERVAL_S = 0.1
KILL_WAIT_S = 10.0
FREEZE_ROUNDS_MAX = 20
STEP_DAEMON = "slurmstepd"
LOG_TAIL_LINES = 25


@dataclass(frozen=True, order=True)
class ProcessRecord:
    """A process, identified by pid and start time because pids are reused.

    `start_ticks` is its start in clock ticks since boot (field 22 of /proc/PID/stat).
    """

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class _Stat:
    """The fields of /proc/PID/stat that this module uses."""

    name: str
    state: str
    parent: int
    start_ticks: int


def _read_stat(pid: int) -> _Stat | None:
    """Return the stat line of `pid`, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may contain spaces and parentheses.
    head, _, rest = text.rpartition(")")
    name, fields = head.partition("(")[2], rest.split()
    return _Stat(name, state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


def _read_environment(pid: int) -> dict[str, str]:
    """Return the initial environment of `pid`; empty if it is gone or a kernel thread."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0"))
    return {name: value for name, sign, value in pairs if sign}


def _pids() -> list[int]:
    """Return all pids of the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def start_daemon(argv: list[str], environment: dict[str, str], output: Path) -> ProcessRecord:
    """Start a daemon that stays in the foreground, in its own session.

    Its output is appended to `output`. Raises FileNotFoundError if the program does not exist.
    """
    with output.open("ab") as stream:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    stat = _read_stat(process.pid)
    assert stat is not None, "an unreaped child has a stat line"
    # Any process may wait for the daemon by its record. This avoids a warning of Popen.
    process.returncode = 0
    return ProcessRecord(process.pid, stat.start_ticks)


def is_alive(record: ProcessRecord) -> bool:
    """Return whether this process still runs. Zombies do not count; our own are reaped here."""
    stat = _read_stat(record.pid)
    if stat is None or stat.start_ticks != record.start_ticks:
        return False
    if stat.state not in ("Z", "X"):
        return True
    # If another process started it, its parent or init reaps it.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(record.pid, os.WNOHANG)
    return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `condition()` is true. Return False after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def send_signal(record: ProcessRecord, number: int) -> None:
    """Send a signal to this process. Does nothing if the process is gone."""
    if is_alive(record):
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, number)


def stop_process(record: ProcessRecord, term_wait_s: float) -> None:
    """Send TERM, wait at most `term_wait_s` seconds, then send KILL.

    Raises DaemonError if the process still runs KILL_WAIT_S after KILL.
    """
    send_signal(record, signal.SIGTERM)
    if wait_until(lambda: not is_alive(record), term_wait_s):
        return
    send_signal(record, signal.SIGKILL)
    if not wait_until(lambda: not is_alive(record), KILL_WAIT_S):
        raise DaemonError(f"process {record.pid} still runs {KILL_WAIT_S} s after SIGKILL")


def find_processes(markers: Iterable[dict[str, str]]) -> set[ProcessRecord]:
    """Return the processes with all variables of any of `markers`, and their descendants.

    The slurmstepd above such a process is included: from Slurm 23.11 on, its title overwrites its
    variables. The calling process and its ancestors are left out.
    """
    stats = {pid: stat for pid in _pids() if (stat := _read_stat(pid)) is not None}
    wanted = [marker.items() for marker in markers]
    found: set[int] = set()
    for pid in stats:
        environment = _read_environment(pid).items()
        if any(marker <= environment for marker in wanted):
            found.add(pid)
    parents = {stats[pid].parent for pid in found}
    found |= {pid for pid in parents if pid in stats and stats[pid].name == STEP_DAEMON}
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    frontier = list(found)
    while frontier:
        new = [pid for pid in children.get(frontier.pop(), []) if pid not in found]
        found.update(new)
        frontier.extend(new)
    found -= _self_and_ancestors(stats)
    return {ProcessRecord(pid, stats[pid].start_ticks) for pid in found}


def _self_and_ancestors(stats: dict[int, _Stat]) -> set[int]:
    """Return the pids of this process and all its ancestors."""
    line: set[int] = set()
    pid = os.getpid()
    while pid in stats and pid not in line:
        line.add(pid)
        pid = stats[pid].parent
    return line


def kill_processes(find: Callable[[], set[ProcessRecord]]) -> int:
    """Kill all processes that `find` returns at the same time. Return how many were killed.

    This simulates a machine that loses power. If they were killed one after the other, a slurmstepd
    could report its task's death, and the job would count as FAILED instead of NODE_FAIL. So all
    are stopped with SIGSTOP first, in rounds that also catch new children. Raises DaemonError if
    some still run KILL_WAIT_S after SIGKILL.
    """
    frozen: set[ProcessRecord] = set()
    for _ in range(FREEZE_ROUNDS_MAX):
        new = {record for record in find() if is_alive(record)} - frozen
        if not new:
            break
        for record in new:
            send_signal(record, signal.SIGSTOP)
        frozen |= new
    # The newest first: the kernel wakes a stopped process whose parent dies, with a SIGHUP.
    for record in sorted(frozen, key=lambda one: (one.start_ticks, one.pid), reverse=True):
        send_signal(record, signal.SIGKILL)
    if not wait_until(lambda: not any(map(is_alive, frozen | find())), KILL_WAIT_S):
        pids = sorted(record.pid for record in frozen | find() if is_alive(record))
        raise DaemonError(f"processes {pids} still run {KILL_WAIT_S} s after SIGKILL")
    return len(frozen)


def read_log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log, or a note if it is missing or empty, below its path."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        text = ""
    tail = text.splitlines()[-lines:]
    return "\n".join([f"--- {log} ---", *(tail or ["(nothing was logged)"])])
