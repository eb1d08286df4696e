"""What the kernel says of a rank's threads and of the processes below it: who waits for what.

Read from `/proc`: it asks nothing of the rank and works whatever state that is in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.workers.agent.guard import descendants

# Where in the kernel a thread waits for another one: locks, sockets, polls, pipes. Sleeping, and
# waiting for a disk, are the rank's own business.
_WAITS: Final = ("futex", "poll", "sk_wait", "wait_woken", "inet_", "unix_", "pipe_")
# Where it waits for storage though its state does not say so: file systems in user space.
_STORAGE: Final = ("request_wait_answer", "fuse_", "nfs", "rpc_wait", "io_schedule", "ptlrpc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def waits_for_others(pid: int) -> bool:
    """True when the process's main thread waits in the kernel for another thread or process."""
    place = _read(Path(f"/proc/{pid}/wchan"))
    return any(word in place for word in _WAITS)


@dataclass(frozen=True)
class Below:
    """A process and those below it: whether a thread waits for storage, and what the processes
    below have computed, read and written so far, in seconds and bytes."""

    on_storage: bool
    cpu_s: float
    io_bytes: int


def look_below(pid: int) -> Below:
    """What goes on in a process and below it.

    Processes that have ended and were waited for count in what was computed.
    """
    below = descendants(pid)
    ticks = sum(_ticks(pid)[2:4]) + sum(sum(_ticks(number)) for number in below)
    return Below(
        on_storage=any(_waits_for_storage(number) for number in (pid, *below)),
        cpu_s=ticks / _TICKS_PER_S,
        io_bytes=sum(_moved_bytes(number) for number in below),
    )


def _waits_for_storage(pid: int) -> bool:
    """True when a thread of the process sleeps where no signal reaches it: storage, mostly."""
    for thread in _threads(pid):
        words = _read(thread / "stat").rpartition(")")[2].split()
        if words and words[0] == "D":
            return True
        place = _read(thread / "wchan")
        if any(word in place for word in _STORAGE):
            return True
    return False


def _threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _ticks(pid: int) -> list[int]:
    """User and system time of a process, then those of its children that have ended."""
    words = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return [int(word) for word in words[11:15]]


def _moved_bytes(pid: int) -> int:
    """Bytes that a process has read and written, also those from and to memory."""
    lines = _read(Path(f"/proc/{pid}/io")).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
