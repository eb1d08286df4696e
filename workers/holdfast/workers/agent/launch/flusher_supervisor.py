"""The agent's flusher supervisor: it starts, restarts and drains the node's flusher."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.contracts import environment
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.errors import HoldfastError, InterfaceError
from holdfast.contracts.node import wire
from holdfast.contracts.node.flusher_process import KeptSlots, start_flusher
from holdfast.contracts.spec.secrets import plain_part, references_in, resolve
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.health.interface import addresses_of
from holdfast.workers.checkpoints.deletion import free_space

STARTS_MAX: Final = 5
REPLY_MARGIN_S: Final = 5.0
LEAVE_WAIT_S: Final = 10.0
POLL_S: Final = 0.05
DETAIL_MAX: Final = 2000
# The variables that locate a program's object store. The flusher must use the same store.
STORE_PREFIXES: Final = ("AWS_", environment.S3_ENDPOINT)


@dataclass
class Flushed:
    """Messages of the flusher that the ranks could not journal.

    `salvaged` are the snapshots that it committed because their ranks were dead. `failed` are the
    saves that failed.
    """

    salvaged: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)


class AgentFlusherSupervisor:
    """Keeps one node's flusher alive; safe for its reader thread and the agent's loop."""

    def __init__(self, context: AgentContext) -> None:
        self._address = os.memfd_create("holdfast-flusher-address", os.MFD_CLOEXEC)
        # The kernel lets only this user's processes open it.
        self.place = f"/proc/{os.getpid()}/fd/{self._address}"
        self.flushed = Flushed()
        # The checkpoints that this node's flusher has committed.
        self.commits = 0
        # Called when this node's flusher has written its part of a step, committed it or failed.
        self.report_progress: Callable[[str], object] = lambda kind: None
        # Called when the neighbour holds a newer copy of this node's snapshots, or cannot.
        self.report_protection: Callable[[dict[str, Any]], object] = lambda message: None
        self._neighbour: dict[str, Any] = {}
        self._copy: dict[str, Any] = {}
        self._hints = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = context
        self._slots = KeptSlots()
        self._drained: dict[str, Any] | None = None
        self._drains = 0
        self._starts = 0
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._start()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The flusher's process id."""
        return self._process.pid if self._process else None

    def tend(self) -> None:
        """Restart the flusher with all slots if it has ended, up to `STARTS_MAX` starts in all."""
        if not self.is_running and not self._closing and self._starts < STARTS_MAX:
            self._start()

    def drain(self, timeout_s: float, lost: Collection[int] = (), *, mirror: bool = False) -> bool:
        """Wait until every sealed and complete step is committed; return False if time ran out.

        The files of the nodes in `lost` are not waited for. With `mirror`, also wait until every
        commit of this node is in the mirror, if there is one.
        """
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and self._starts < STARTS_MAX:
            left_s = give_up - time.monotonic()
            if self._ask_drain(left_s, lost, mirror):
                return True
            self.tend()
            time.sleep(POLL_S)
        return False

    def protect(self, launch: int, node: int, holder: int) -> None:
        """Have the flusher copy the snapshots of a launch to the flusher of node `holder`.

        A restarted flusher is asked again. `node` is the place of this node in the launch.
        """
        context = self._context
        interface = context.request.launch.network_interface
        addresses: list[str] = []
        with contextlib.suppress(InterfaceError):
            addresses = addresses_of(interface, context.host) if interface else []
        self._copy = {}
        self._neighbour = {
            "launch": launch,
            "node": node,
            "holder": holder,
            "folder": str(context.attempt.launch(launch)),
            "ports": context.request.supervision.ports,
            "addresses": addresses,
        }
        self._ask_for_copies()

    def copy(self, launch: int, round_: int, keep: int) -> None:
        """Have the flusher copy the first snapshot from step `round_` on, see `wire`."""
        self._copy = {"launch": launch, "round": round_, "keep": keep}
        self._ask("copy", self._copy)

    def _ask_for_copies(self) -> None:
        self._ask("neighbour", self._neighbour)
        self._ask("copy", self._copy)

    def _ask(self, kind: str, message: dict[str, Any]) -> None:
        if self._connection is not None and message:
            # A flusher that has ended is started again, and asked then.
            with contextlib.suppress(OSError):
                wire.send(self._connection, kind, **message)

    def give_hint(self) -> None:
        """Have the flusher look for what other nodes have written. Never blocks."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._hints, 1)

    def forget(self, launch: int) -> None:
        """Release the slots of a launch that is over and drained."""
        self._slots.release(launch)

    def move(self, context: AgentContext, launch: int) -> None:
        """Replace the flusher by one for another place of the node, from `launch` on.

        A flusher counts lost nodes by their places, which another node may have from now on.
        """
        self._hang_up()
        self._await_end()
        self._context, self._starts = context, 0
        self.forget(launch - 1)
        self._start()

    def close(self) -> None:
        """Hang up. The flusher finishes what is sealed and exits, or is killed after a while."""
        self._closing = True
        self._hang_up()
        self._await_end()
        self._slots.release()
        os.close(self._address)
        hints, self._hints = self._hints, -1
        os.close(hints)

    def _await_end(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(LEAVE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(LEAVE_WAIT_S)

    def _start(self) -> None:
        self._hang_up()
        self._starts += 1
        logs = self._context.attempt.node_logs(self._context.node)
        logs.mkdir(parents=True, exist_ok=True)
        self._process, ours = start_flusher(
            self._address,
            node=self._context.node,
            nodes=self._context.nodes,
            run=self._context.run.directory,
            log=logs / "flusher.log",
            budget=self._context.request.checkpoint.budget_bytes,
            hints=self._hints,
            env=self._environment(),
        )
        self._connection = ours
        self._slots.give_back(ours)
        self._ask_for_copies()
        threading.Thread(target=self._read, args=(ours,), name="flusher", daemon=True).start()

    def _environment(self) -> dict[str, str]:
        """Return the flusher's variables, without unresolved references, which torchrun refuses."""
        request = self._context.request
        stores = {k: v for k, v in references_in(request.environment).items() if is_of_store(k)}
        given = {**plain_part(request.environment), **resolve(stores, self._context.run)[0]}
        return build_environment(
            os.environ,
            given,
            request.tiers,
            flush_timeout_s=request.supervision.flush_timeout_s,
            write_limit=request.checkpoint.write_limit_bytes,
        )

    def _ask_drain(self, timeout_s: float, lost: Collection[int], mirror: bool) -> bool:
        """Send one drain request; return False if the flusher ended or did not answer in time."""
        connection, process = self._connection, self._process
        if connection is None or process is None:
            return False
        self._drains += 1
        try:
            wire.send(
                connection,
                "drain",
                number=self._drains,
                timeout_s=max(timeout_s - REPLY_MARGIN_S, timeout_s / 2),
                lost=sorted(lost),
                mirror=mirror,
            )
        except OSError:
            return False
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            answer = self._drained
            # The answer to an earlier request may arrive now.
            if answer is not None and answer.get("number") == self._drains:
                return bool(answer["is_done"]) and not answer["unmirrored"]
            if process.poll() is not None:
                return False
            time.sleep(POLL_S)
        return False

    def _read(self, connection: socket.socket) -> None:
        """Run the reader thread: keep slots and record commits until the connection ends."""
        while True:
            try:
                received = wire.receive(connection)
            except (OSError, ValueError):
                return
            if received is None:
                return
            message, descriptors = received
            if message["kind"] == "full":
                # Deleting takes time, and this thread must continue to receive slots.
                arguments = (connection, int(message["step"]))
                threading.Thread(target=self._free_space, args=arguments, daemon=True).start()
            self._take(message, descriptors)

    def _free_space(self, connection: socket.socket, step: int) -> None:
        """Free what the keep rules allow, and report the freed bytes to the flusher."""
        try:
            freed, message = free_space(self._context.run, writer=f"agent-{self._context.node:04d}")
        except (OSError, HoldfastError) as error:
            freed, message = 0, f"could not free space: {error}"
        with contextlib.suppress(OSError):
            wire.send(connection, "room", step=step, freed_bytes=freed, detail=message[:DETAIL_MAX])
            print(f"no space for step {step}: {message}", file=sys.stderr, flush=True)

    def _take(self, message: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        kind = message["kind"]
        if kind == "keep" and descriptors:
            self._slots.keep(message, descriptors[0])
        elif kind == "drained":
            self._drained = message
        elif kind == "committed" and message.get("is_salvaged"):
            self.flushed.salvaged.append(message)
        elif kind == "failed":
            self.flushed.failed.append(message)
        elif kind == "protected":
            self.report_protection(message)
        self.commits += kind == "committed"
        if kind in {"wrote", "committed", "failed"}:
            self.report_progress(kind)

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None


def is_of_store(name: str) -> bool:
    """Return True for a variable that configures a program's object store."""
    return name.startswith(STORE_PREFIXES)


def build_environment(
    inherited: Mapping[str, str],
    spec: Mapping[str, str],
    tiers: Tiers,
    *,
    flush_timeout_s: float,
    write_limit: int | None = None,
) -> dict[str, str]:
    """Return the flusher's environment, with the spec's stores, mirror and limits."""
    stores = {k: v for k, v in spec.items() if is_of_store(k)}
    limits = {environment.FLUSH_TIMEOUT: str(flush_timeout_s)}
    if write_limit is not None:
        limits[environment.CHECKPOINT_WRITE_LIMIT] = str(write_limit)
    # Under an agent, only the spec's limit counts.
    kept = {k: v for k, v in inherited.items() if k != environment.CHECKPOINT_WRITE_LIMIT}
    return {**kept, **stores, **limits, **tiers.to_environment()}
