"""torchrun's parent, which ensures that no process below it outlives it or the agent.

`python -m holdfast.workers.agent.guard <command …>` has one end of the agent's pipe as its standard
input. When the pipe is closed, by request or because the agent was killed, the guard kills
everything below. It ignores the signals by which clusters announce an end, and so do torchrun and
ranks at their start: only the agent handles them. `trainer.child_signals` says what ranks do then.

Standard library only: it is started once per launch and should cost little.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from typing import Final

IGNORED: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
POLL_S: Final = 0.05
KILL_WAIT_S: Final = 20.0
KILLED_EXIT_CODE: Final = 137
_PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, where Linux supports it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_running(pid: int) -> bool:
    """Return True while process `pid` runs; a zombie does not run."""
    return _state(pid) not in {b"", b"Z", b"X"}


def is_unreaped(pid: int) -> bool:
    """Return True if process `pid` is dead and its parent has not waited for it yet."""
    return _state(pid) == b"Z"


def _state(pid: int) -> bytes:
    """Return the kernel's state letter of a process, or b'' if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def descendants(root: int, exempt: frozenset[int] = frozenset()) -> list[int]:
    """Return the ids of all live processes below `root`, without `exempt` and all below those."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{entry}/stat", "rb") as stream:
                # The name is in brackets and may contain anything. The fields after it do not.
                state, parent = stream.read().rpartition(b")")[2].split()[:2]
            if state not in {b"Z", b"X"}:
                children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        below = [pid for pid in children.get(pending.pop(), []) if pid not in exempt]
        found += below
        pending += below
    return found


def kill_all_below(root: int, exempt: frozenset[int] = frozenset()) -> bool:
    """Kill every process below `root` repeatedly until none is left; return False if some stay.

    Dead processes are left for their parents to reap.
    """
    give_up = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < give_up:
        below = descendants(root, exempt)
        if not below:
            return True
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return False


def watch(child: subprocess.Popen[bytes]) -> int:
    """Wait for `child` or the end of standard input; return the exit code to use."""
    waiter = select.poll()
    waiter.register(0, select.POLLIN)
    while True:
        readable = waiter.poll(1000 * POLL_S)
        code = child.poll()
        if code is not None:
            return code if code >= 0 else 128 - code
        if readable and not os.read(0, 1):
            return KILLED_EXIT_CODE


def main(command: list[str]) -> int:
    """Run `command` until it ends or the agent closes the pipe, then kill all processes below."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = watch(child)
    if not kill_all_below(os.getpid()):
        # The exit code counts even if a full disk refuses the line.
        with contextlib.suppress(OSError):
            print("guard: some processes could not be killed", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
