"""Access to a rank's Python stacks from the agent, whatever the rank is doing.

The agent first tries py-spy. The kernel may refuse that, so the rank allows the agent to trace it.
As a second way, the rank registers a signal on which `faulthandler` writes the stacks to a memory
file. This handler is the one exception to "handlers only set a flag". It is written in C for this
use, allocates nothing, takes no lock, and works even if the interpreter is stuck.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import signal
from typing import Final

from holdfast.contracts import environment
from holdfast.contracts.node.rank_status import RankRecord

# Only the program itself uses real-time signals. Launchers do not send them.
STACKS_SIGNAL: Final = signal.SIGRTMIN + 6
_PR_SET_PTRACER: Final = 0x59616D61
_FLUSHER_SUPERVISOR: Final = re.compile(r"/proc/(\d+)/fd/\d+")


def offer_stacks(record: RankRecord) -> None:
    """Let the agent of this node read this process's stacks, if the system supports it."""
    flusher_supervisor = _FLUSHER_SUPERVISOR.fullmatch(os.environ.get(environment.RANK_STATUS, ""))
    if flusher_supervisor:
        _allow_tracing_by(int(flusher_supervisor[1]))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        record.offer_stacks(STACKS_SIGNAL, _stacks_file())


@functools.cache
def _stacks_file() -> int:
    """Return the memory file for this process's stacks, and install its handler.

    The handler stays until the process ends. Without it, a signal that is on its way would end the
    process.
    """
    descriptor = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
    # The interpreter removes the handler when it ends. Without this, a late question for the stacks
    # would then kill the process, and hide why it ends.
    with contextlib.suppress(ValueError):
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor


def _allow_tracing_by(pid: int) -> None:
    """Allow tracing under Yama, by which only parents and declared processes may trace a child."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)
