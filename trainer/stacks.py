"""How a rank's stacks can be had from outside, whatever the rank is doing.

py-spy is the agent's first means; the kernel may refuse it, so the rank names the agent as one who
may trace it, and offers a second means: a signal that makes `faulthandler` write the stacks to a
memory file. That handler is the one exception to "handlers only set a flag": it is written in C for
this use, allocates nothing, takes no lock, and works where the interpreter is stuck.
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
from holdfast.contracts.rank_status import RankRecord

# Real-time signals are nobody's but the program's own; launchers send none of them.
STACKS_SIGNAL: Final = signal.SIGRTMIN + 6
_PR_SET_PTRACER: Final = 0x59616D61
_FLUSHER_SUPERVISOR: Final = re.compile(r"/proc/(\d+)/fd/\d+")


def offer_stacks(record: RankRecord) -> None:
    """Let the agent of this node see this process's stacks; nothing where that cannot be."""
    flusher_supervisor = _FLUSHER_SUPERVISOR.fullmatch(os.environ.get(environment.RANK_STATUS, ""))
    if flusher_supervisor:
        _allow_tracing_by(int(flusher_supervisor[1]))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        record.offer_stacks(STACKS_SIGNAL, _stacks_file())


@functools.cache
def _stacks_file() -> int:
    """The memory file of this process's stacks, its handler installed; kept until the end.

    Taking the handler away would let a signal that is on its way end the process.
    """
    descriptor = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor


def _allow_tracing_by(pid: int) -> None:
    """Under Yama a process is traced by its parents and whom it names, with their children."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)
