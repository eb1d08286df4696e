"""The flusher supervisor: starts it, holds its staging slots, starts it again with them.

The slots are memory files. While the flusher supervisor holds their descriptors, neither a rank's
nor the flusher's death loses a step that was sealed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.contracts import environment, wire
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.mirrors import Tiers
from holdfast.contracts.secrets import plain_part, references_in, resolve
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.deletion import free_space

STARTS_MAX: Final = 5
REPLY_MARGIN_S: Final = 5.0
LEAVE_WAIT_S: Final = 10.0
POLL_S: Final = 0.05
WORDS_MAX: Final = 2000
# How a program is told of its object store; the flusher must find the same one.
STORE_PREFIXES: Final = ("AWS_", environment.S3_ENDPOINT)
MODULE: Final = "holdfast.trainer.flusher"


@dataclass
class Flushed:
    """What the flusher told that the ranks could not: messages as they came.

    `salvaged` are the snapshots that it committed because their ranks were dead.
    """

    salvaged: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)


class FlusherSupervisor:
    """One node's flusher, kept alive; safe for its reader thread and the agent's loop."""

    def __init__(self, context: AgentContext) -> None:
        self._address = os.memfd_create("holdfast-flusher-address", os.MFD_CLOEXEC)
        # Opened by this user's processes alone, as the kernel sees to.
        self.place = f"/proc/{os.getpid()}/fd/{self._address}"
        self.told = Flushed()
        self._context = context
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int, int], int] = {}
        self._drained: dict[str, Any] | None = None
        self._drains = 0
        self._starts = 0
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._start()

    @property
    def problem(self) -> str:
        """Why there is no flusher, or an empty string."""
        if self._starts < STARTS_MAX or self.is_running:
            return ""
        log = self._context.attempt.node_logs(self._context.node) / "flusher.log"
        return f"the flusher ended {self._starts} times; see {log}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The flusher's process number."""
        return self._process.pid if self._process else None

    def tend(self) -> None:
        """Start the flusher again when it has ended, with all slots; `STARTS_MAX` times."""
        if not self.is_running and not self._closing and self._starts < STARTS_MAX:
            self._start()

    def drain(self, timeout_s: float, lost: Collection[int] = (), *, mirror: bool = False) -> bool:
        """Wait until everything sealed and complete is committed; False when time ran out.

        `lost` are the nodes that are gone: nothing more will come of them. With `mirror`, also
        until every commit of this node is copied there, if there is one.
        """
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and self._starts < STARTS_MAX:
            left_s = give_up - time.monotonic()
            if self._ask_drain(left_s, lost, mirror):
                return True
            self.tend()
            time.sleep(POLL_S)
        return False

    def forget(self, launch: int) -> None:
        """Give back the slots of a launch that is over and drained."""
        with self._lock:
            for key in [key for key in self._slots if key[2] <= launch]:
                os.close(self._slots.pop(key))

    def close(self) -> None:
        """Hang up: the flusher finishes what is sealed and leaves, or is killed after a while."""
        self._closing = True
        self._hang_up()
        if self._process is not None:
            try:
                self._process.wait(LEAVE_WAIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(LEAVE_WAIT_S)
        self.forget(sys.maxsize)
        os.close(self._address)

    def _start(self) -> None:
        self._hang_up()
        self._starts += 1
        ours, theirs = wire.pair()
        logs = self._context.attempt.node_logs(self._context.node)
        logs.mkdir(parents=True, exist_ok=True)
        request = self._context.request
        command = [sys.executable, "-m", MODULE, "--address-fd", str(self._address)]
        command += ["--node", str(self._context.node), "--nodes", str(self._context.nodes)]
        command += ["--run", str(self._context.run.directory)]
        command += ["--supervisor-fd", str(theirs.fileno())]
        if request.checkpoint_budget_bytes is not None:
            command += ["--budget", str(request.checkpoint_budget_bytes)]
        with open(logs / "flusher.log", "ab") as log, theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), self._address),
                start_new_session=True,
                env=build_environment(
                    os.environ,
                    self._given(),
                    request.tiers,
                    request.supervision.flush_timeout_s,
                ),
            )
        self._connection = ours
        self._give_back(ours)
        threading.Thread(target=self._read, args=(ours,), name="flusher", daemon=True).start()

    def _given(self) -> dict[str, str]:
        """The spec's variables. A reference without a value is left out: torchrun refuses it."""
        environment = self._context.request.environment
        stores = {k: v for k, v in references_in(environment).items() if is_of_store(k)}
        return {**plain_part(environment), **resolve(stores, self._context.run)[0]}

    def _give_back(self, connection: socket.socket) -> None:
        """Hand every kept slot to a flusher that was started again."""
        with self._lock:
            for (rank, slot, launch), handle in self._slots.items():
                with contextlib.suppress(OSError):
                    wire.send(
                        connection,
                        "kept",
                        descriptors=(handle,),
                        rank=rank,
                        slot=slot,
                        launch=launch,
                    )

    def _ask_drain(self, timeout_s: float, lost: Collection[int], mirror: bool) -> bool:
        """One question; False when the flusher ended before it answered, or was late."""
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
            # The answer to an earlier question may come now.
            if answer is not None and answer.get("number") == self._drains:
                return bool(answer["is_done"]) and not answer["unmirrored"]
            if process.poll() is not None:
                return False
            time.sleep(POLL_S)
        return False

    def _read(self, connection: socket.socket) -> None:
        """The reader thread: keeps slots and notes what was committed, until the end."""
        while True:
            try:
                received = wire.receive(connection)
            except (OSError, ValueError):
                return
            if received is None:
                return
            message, descriptors = received
            if message["kind"] == "full":
                # Deleting takes a while, and this thread must go on to take slots.
                arguments = (connection, int(message["step"]))
                threading.Thread(target=self._free_space, args=arguments, daemon=True).start()
            self._note(message, descriptors)

    def _free_space(self, connection: socket.socket, step: int) -> None:
        """Free what the keep rules allow, and tell the flusher how much that was."""
        try:
            freed, words = free_space(self._context.run, writer=f"agent-{self._context.node:04d}")
        except (OSError, HoldfastError) as error:
            freed, words = 0, f"nothing could be freed: {error}"
        with contextlib.suppress(OSError):
            wire.send(connection, "room", step=step, freed_bytes=freed, detail=words[:WORDS_MAX])
            print(f"no room for step {step}: {words}", file=sys.stderr, flush=True)

    def _note(self, message: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        kind = message["kind"]
        if kind == "keep" and descriptors:
            key = (int(message["rank"]), int(message["slot"]), int(message["launch"]))
            with self._lock:
                if key in self._slots:
                    os.close(self._slots[key])
                self._slots[key] = descriptors[0]
        elif kind == "drained":
            self._drained = message
        elif kind == "committed" and message.get("is_salvaged"):
            self.told.salvaged.append(message)
        elif kind == "failed":
            self.told.failed.append(message)

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None


def is_of_store(name: str) -> bool:
    """True for a variable that tells a program of its object store."""
    return name.startswith(STORE_PREFIXES)


def build_environment(
    inherited: Mapping[str, str], spec: Mapping[str, str], tiers: Tiers, flush_timeout_s: float
) -> dict[str, str]:
    """The flusher's environment: this one, with what the spec says of copies and waits: pure."""
    stores = {k: v for k, v in spec.items() if is_of_store(k)}
    limit = {environment.FLUSH_TIMEOUT: str(flush_timeout_s)}
    return {**inherited, **stores, **limit, **tiers.to_environment()}
