"""The kernel's view of a rank's threads and of the processes below it: what they wait for.

It reads `/proc`, so it needs nothing from the rank and works in any state of the rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.workers.agent.guard import descendants

# Kernel functions in which a thread waits for another one: locks, sockets, polls, pipes. Sleeping
# and waiting for a disk count as the rank's own time.
_WAITS: Final = ("futex", "poll", "sk_wait", "wait_woken", "inet_", "unix_", "pipe_")
# Kernel functions of user-space and network file systems that wait for storage in other states.
_STORAGE: Final = ("request_wait_answer", "fuse_", "nfs", "rpc_wait", "io_schedule", "ptlrpc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def waits_for_others(pid: int) -> bool:
    """Return True if the main thread waits in the kernel for another thread or process."""
    place = _read(Path(f"/proc/{pid}/wchan"))
    return any(name in place for name in _WAITS)


@dataclass(frozen=True)
class ProcessTree:
    """A process and those below it.

    `computed_s` are the CPU seconds of its main thread. `on_storage` is True if a thread of them
    waits for storage. `cpu_s` and `io_bytes` are the CPU seconds and the I/O of the processes
    below.
    """

    on_storage: bool
    cpu_s: float
    io_bytes: int
    computed_s: float = 0.0


def look_below(pid: int) -> ProcessTree:
    """Return what a process and those below it are doing.

    The CPU time of processes that have ended and were waited for is included.
    """
    below = descendants(pid)
    own = Path(f"/proc/{pid}")
    ticks = sum(_ticks(own)[2:4]) + sum(sum(_ticks(Path(f"/proc/{n}"))) for n in below)
    return ProcessTree(
        computed_s=sum(_ticks(own / "task" / str(pid))[:2]) / _TICKS_PER_S,
        on_storage=any(_waits_for_storage(number) for number in (pid, *below)),
        cpu_s=ticks / _TICKS_PER_S,
        io_bytes=sum(_moved_bytes(number) for number in below),
    )


def _waits_for_storage(pid: int) -> bool:
    """Return True if a thread is in uninterruptible sleep, which is mostly for storage."""
    for thread in _threads(pid):
        fields = _read(thread / "stat").rpartition(")")[2].split()
        if fields and fields[0] == "D":
            return True
        place = _read(thread / "wchan")
        if any(name in place for name in _STORAGE):
            return True
    return False


def _threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _ticks(place: Path) -> list[int]:
    """Return user and system time of a process or thread, then those of its ended children."""
    fields = _read(place / "stat").rpartition(")")[2].split()
    return [int(field) for field in fields[11:15]]


def _moved_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written, including those from and to memory."""
    lines = _read(Path(f"/proc/{pid}/io")).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def ignores(pid: int, signal_number: int) -> bool:
    """Return True if a process ignores a signal, or if it does not exist."""
    try:
        with open(f"/proc/{pid}/status", "rb") as stream:
            masks = [line.split()[1] for line in stream if line.startswith(b"SigIgn:")]
        return not masks or bool(int(masks[0], 16) >> (signal_number - 1) & 1)
    except OSError:
        return True
