"""A second torchrun on a node, whose ranks are loaded and wait for the next launch.

It holds no GPU. The kernel kills it first when memory runs out, so it never costs a training rank.

In a job of several nodes, each standby is a torchrun on one node alone, whose ranks read their
place when the launch begins. So spare nodes have standbys too, and the loss of nodes ends no other
node's standby.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.errors import AgreementError, HoldfastError
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.guard import descendants
from holdfast.workers.agent.launch.command import Handles, log_directory, place_environment
from holdfast.workers.agent.launch.torchrun import Torchrun
from holdfast.workers.agent.node import LedNode, NodeReport

# Node 0's plan of warm standbys: when all nodes start one, and whether a launch uses them.


class StandbyPlan:
    """Plans one standby on all nodes at a time, for the launch after the current one."""

    def __init__(
        self, context: AgentContext, address: Callable[[], str], note: Callable[[str], None]
    ) -> None:
        self._context, self._address, self._note = context, address, note
        self._number, self._port = 0, 0
        self._since, self._is_decided = 0.0, False

    def take_port(
        self, number: int, nodes: Sequence[LedNode], reports: Collection[NodeReport]
    ) -> int:
        """Return the port for launch `number`: the standbys' if every node has one, else a new one.

        A node whose standby has another port ends that standby and starts torchrun normally. In a
        job of several nodes, standbys have ports of their own.
        """
        ready = [report.standby for report in reports]
        is_ready = self._port and len(ready) == len(nodes) and set(ready) == {number}
        ports = self._context.request.supervision.port_range
        port = self._port if is_ready else free_port(ports)
        self._number, self._port = number, 0
        self._since, self._is_decided = 0.0, False
        return port

    def look(
        self,
        nodes: Sequence[LedNode],
        spares: Sequence[LedNode],
        reports: Collection[NodeReport],
        restarts: int,
    ) -> None:
        """Start a warm standby on every node after `standby_after_s` of training.

        Loading takes CPU time from training, so short trial runs should not pay for it.
        """
        supervision = self._context.request.supervision
        after_s = supervision.standby_after_s
        if self._is_decided or after_s == "off" or any(r.completed <= r.resumed for r in reports):
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < after_s:
            return
        self._is_decided = True
        if restarts >= supervision.restarts_in_place or not self._may_load_ahead():
            return
        address = ""
        if self._context.nodes_of_job == 1:
            try:
                self._port, address = free_port(supervision.port_range), self._address()
            except HoldfastError as error:
                # Training continues without one.
                self._note(f"no warm standby: {error}")
                return
        for node in (*spares, *reversed(nodes)):
            node.prepare(self._number + 1, address, self._port)

    def _may_load_ahead(self) -> bool:
        """Return True unless the program sets variables that libraries read when they load.

        If the program has no session, its variables are unknown, and this returns False.
        """
        attempt, current = self._context.attempt, (self._context.attempt.number, self._number)
        for event in reversed(read_journal(attempt.rank_journal)[0]):
            position = (event.data.get("attempt"), event.data.get("launch"))
            if event.kind is EventKind.RESUMED and position == current:
                changed = event.data.get("changed_variables", [])
                if changed:
                    self._note(f"no warm standby: the program itself sets {', '.join(changed)}")
                return not changed
        return False


def free_port(ports: range | None) -> int:
    """Return a port in `ports`, or any port if None, that was free a moment ago.

    If another process takes it meanwhile, the launch is repeated. Raises `AgreementError` if no
    port in `ports` is free.
    """
    for port in [0] if ports is None else random.sample(ports, len(ports)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As torch's store does. Else a port counts as taken for a minute after its last use.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    tried = "any" if ports is None else f"{ports.start}-{ports.stop - 1}"
    raise AgreementError(
        f"no port of {tried} is free for torchrun; give supervision.ports a larger range"
    )


# The memory of torch in one process, and of torchrun. With less free, a node has no standby.
BYTES_PER_PROCESS: Final = 512 << 20
OOM_FIRST: Final = 1000
LOOPBACK: Final = "127.0.0.1"


class Place:
    """A file in memory with the place of a node's ranks in a launch, which they read at `path`."""

    def __init__(self) -> None:
        self._handle = os.memfd_create("holdfast-place", os.MFD_CLOEXEC)
        # The kernel lets only this user's processes open it.
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"

    def write(self, variables: Mapping[str, str]) -> None:
        os.pwrite(self._handle, json.dumps(dict(variables)).encode(), 0)

    def close(self) -> None:
        """Free the file, after the ranks have read it."""
        os.close(self._handle)


class WarmStandby:
    """A torchrun for `launch`, started in advance; call `release` or `discard` once."""

    def __init__(
        self, context: AgentContext, launch: int, address: str, port: int, handles: Handles
    ) -> None:
        """Start it. With an empty `address`, it gets its place and `port` from `release`."""
        self.launch, self.port = launch, port
        self._place = Place() if not address else None
        self._ranks = context.request.ranks_per_node
        self._logs = log_directory(context, launch)
        self._standby_pipe, self._release_fd = os.pipe2(os.O_CLOEXEC)
        self._torchrun = Torchrun(
            context,
            launch,
            address=address or LOOPBACK,
            port=port or free_port(context.request.supervision.port_range),
            handles=handles,
            standby_pipe=f"/proc/{os.getpid()}/fd/{self._standby_pipe}",
            place=self._place.path if self._place else "",
        )
        _weigh(self.pid, OOM_FIRST)

    @property
    def pid(self) -> int:
        """The id of the process above all others of this standby."""
        return self._torchrun.pid

    @property
    def is_alive(self) -> bool:
        return self._torchrun.is_whole

    def fits(self, launch: int, port: int) -> bool:
        """Return True if a launch whose ranks meet at `port` can use this standby."""
        return self.launch == launch and (self._place is not None or self.port == port)

    def release(self, context: AgentContext, address: str, port: int) -> Torchrun:
        """Let the ranks start the program. One that is still loading starts when it has loaded.

        `context` has the place of the node in the launch.
        """
        if self._place is not None:
            self._place.write(place_environment(context, address, port))
            self._torchrun.move(context)
        own = int(Path("/proc/self/oom_score_adj").read_text())
        for number in (self.pid, *descendants(self.pid)):
            _weigh(number, own)
        os.write(self._release_fd, bytes(self._ranks))
        return self._torchrun

    def close(self) -> None:
        """Close the standby pipe, after its ranks have exited."""
        os.close(self._standby_pipe)
        os.close(self._release_fd)
        if self._place is not None:
            self._place.close()

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
