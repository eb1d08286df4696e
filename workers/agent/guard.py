"""torchrun's parent: whatever happens, no process below it outlives it or the agent.

`python -m holdfast.workers.agent.guard <command …>`, with the agent's end of a pipe as standard
input. The pipe's end, asked for or because the agent was killed, means: kill everything below.
The signals by which clusters announce an end are ignored here and so by all that is started
below, ranks and their data loaders included; the agent alone answers them.

Standard library only: this is started once per launch and should cost little.
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
    """Become the parent of every descendant whose own parent ends, where Linux offers it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_running(number: int) -> bool:
    """True while a process of that number runs; a zombie does not."""
    return _state(number) not in {b"", b"Z", b"X"}


def is_unreaped(number: int) -> bool:
    """True when the process of that number is dead and its parent has not noticed."""
    return _state(number) == b"Z"


def _state(number: int) -> bytes:
    """The kernel's letter for how a process is; empty when there is none."""
    try:
        with open(f"/proc/{number}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def descendants(root: int, exempt: frozenset[int] = frozenset()) -> list[int]:
    """Numbers of all live processes below `root`, those `exempt` and all below them left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{entry}/stat", "rb") as stream:
                # The name stands in brackets and may hold anything; what follows does not.
                state, parent = stream.read().rpartition(b")")[2].split()[:2]
            if state not in {b"Z", b"X"}:
                children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        below = [number for number in children.get(pending.pop(), []) if number not in exempt]
        found += below
        pending += below
    return found


def kill_all_below(root: int, exempt: frozenset[int] = frozenset()) -> bool:
    """KILL every process below `root`, again until none is left; False when some stay.

    The dead are left to their parents to reap.
    """
    give_up = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < give_up:
        below = descendants(root, exempt)
        if not below:
            return True
        for number in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(POLL_S)
    return False


def watch(child: subprocess.Popen[bytes]) -> int:
    """Wait for `child` or for the end of standard input; returns the exit code to give."""
    while True:
        readable, _, _ = select.select([0], [], [], POLL_S)
        code = child.poll()
        if code is not None:
            return code if code >= 0 else 128 - code
        if readable and not os.read(0, 1):
            return KILLED_EXIT_CODE


def main(command: list[str]) -> int:
    """Run `command` until it ends or the agent wants it gone; nothing is left below after it."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = watch(child)
    if not kill_all_below(os.getpid()):
        print("guard: processes are left that cannot be killed", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
