"""A second torchrun of a node, its ranks loaded and waiting, for the next launch.

It holds no GPU. Its memory is the kernel's first choice when memory runs out, so that it never
costs a rank that trains.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

import psutil

from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.guard import descendants
from holdfast.workers.agent.torchrun import Handles, Torchrun, log_directory

# What torch takes in a process, and torchrun itself; a node with less free memory has no standby.
BYTES_PER_PROCESS: Final = 512 << 20
OOM_FIRST: Final = 1000


class WarmStandby:
    """torchrun for `launch`, started ahead; `release` or `discard` it once."""

    def __init__(
        self, context: AgentContext, launch: int, address: str, port: int, handles: Handles
    ) -> None:
        self.launch, self.port = launch, port
        self._ranks = context.request.gpus_per_node
        self._logs = log_directory(context, launch)
        self._standby_pipe, self._words = os.pipe2(os.O_CLOEXEC)
        self._torchrun = Torchrun(
            context,
            launch,
            address=address,
            port=port,
            handles=handles,
            standby_pipe=f"/proc/{os.getpid()}/fd/{self._standby_pipe}",
        )
        _weigh(self.pid, OOM_FIRST)

    @property
    def pid(self) -> int:
        """The process number above all that this standby has started."""
        return self._torchrun.pid

    @property
    def is_alive(self) -> bool:
        return self._torchrun.is_whole

    def release(self) -> Torchrun:
        """Let the ranks be the program. One that still loads begins as soon as it has."""
        own = int(Path("/proc/self/oom_score_adj").read_text())
        for number in (self.pid, *descendants(self.pid)):
            _weigh(number, own)
        os.write(self._words, bytes(self._ranks))
        return self._torchrun

    def close(self) -> None:
        """Give the standby pipe back, when its ranks have gone."""
        os.close(self._standby_pipe)
        os.close(self._words)

    def discard(self) -> None:
        """End a warm standby that nobody wants, and leave no trace of it."""
        self._torchrun.kill()
        self.close()
        shutil.rmtree(self._logs, ignore_errors=True)


def has_memory_for(ranks: int) -> bool:
    """True when the node has the memory for a warm standby of so many ranks."""
    return psutil.virtual_memory().available >= (ranks + 1) * BYTES_PER_PROCESS


def _weigh(number: int, adjustment: int) -> None:
    """Set how soon the kernel kills a process for want of memory; some systems refuse."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{number}/oom_score_adj").write_text(str(adjustment))
