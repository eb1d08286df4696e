"""A second torchrun on a node, whose ranks are loaded and wait for the next launch.

It holds no GPU. The kernel kills it first when memory runs out, so it never costs a training rank.
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
from holdfast.workers.agent.launch.command import Handles, log_directory
from holdfast.workers.agent.launch.torchrun import Torchrun

# The memory of torch in one process, and of torchrun. With less free, a node has no standby.
BYTES_PER_PROCESS: Final = 512 << 20
OOM_FIRST: Final = 1000


class WarmStandby:
    """A torchrun for `launch`, started in advance; call `release` or `discard` once."""

    def __init__(
        self, context: AgentContext, launch: int, address: str, port: int, handles: Handles
    ) -> None:
        self.launch, self.port = launch, port
        self._ranks = context.request.ranks_per_node
        self._logs = log_directory(context, launch)
        self._standby_pipe, self._release_fd = os.pipe2(os.O_CLOEXEC)
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
        """The id of the process above all others of this standby."""
        return self._torchrun.pid

    @property
    def is_alive(self) -> bool:
        return self._torchrun.is_whole

    def release(self) -> Torchrun:
        """Let the ranks start the program. One that is still loading starts when it has loaded."""
        own = int(Path("/proc/self/oom_score_adj").read_text())
        for number in (self.pid, *descendants(self.pid)):
            _weigh(number, own)
        os.write(self._release_fd, bytes(self._ranks))
        return self._torchrun

    def close(self) -> None:
        """Close the standby pipe, after its ranks have exited."""
        os.close(self._standby_pipe)
        os.close(self._release_fd)

    def discard(self) -> None:
        """End a warm standby that is not needed, and delete its logs."""
        self._torchrun.kill()
        self.close()
        shutil.rmtree(self._logs, ignore_errors=True)


def has_memory_for(ranks: int) -> bool:
    """Return True if the node has enough memory for a warm standby of `ranks` ranks."""
    return psutil.virtual_memory().available >= (ranks + 1) * BYTES_PER_PROCESS


def _weigh(pid: int, adjustment: int) -> None:
    """Set how soon the kernel kills a process when memory runs out, where the system allows it."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(adjustment))
