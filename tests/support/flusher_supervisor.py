"""A test flusher supervisor with a real flusher, and fake ranks without torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.node import wire
from holdfast.trainer.slots.slots import Slot, SlotState

WAIT_S = 20.0


def wait_until(is_so: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until `is_so()`; fails the test with `what` if it does not become true in time."""
    give_up = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.002)


class SlotHolder:
    """Starts a flusher, holds the slots' descriptors, and can restart the flusher with them."""

    def __init__(
        self,
        name: str,
        *,
        node: int = 0,
        nodes: int = 1,
        environment: Mapping[str, str] | None = None,
        budget: int | None = None,
        run: Path | None = None,
    ) -> None:
        """`environment` is added to this process's own for the flusher.

        The argument `name` is only descriptive; ranks find the flusher by the attribute `name`.
        """
        self._address = os.memfd_create(name, os.MFD_CLOEXEC)
        self.name = f"/proc/{os.getpid()}/fd/{self._address}"
        self._node, self._nodes = node, nodes
        self._budget, self._run = budget, run
        self._environment = {**os.environ, **(environment or {})}
        self.kept: dict[tuple[int, int, int], int] = {}
        self.heard: list[dict[str, Any]] = []
        self.free_space: Callable[[], tuple[int, str]] = lambda: (
            0,
            "this flusher supervisor frees nothing",
        )
        self.start()

    def start(self) -> None:
        """Start a flusher and pass it the slots of an earlier one."""
        self._socket, theirs = wire.pair()
        options = ["--address-fd", str(self._address), "--supervisor-fd", str(theirs.fileno())]
        options += ["--node", str(self._node), "--nodes", str(self._nodes)]
        options += ["--budget", str(self._budget)] if self._budget is not None else []
        options += ["--run", str(self._run)] if self._run is not None else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.trainer.flusher", *options],
            pass_fds=[theirs.fileno(), self._address],
            env=self._environment,
            start_new_session=True,
        )
        theirs.close()
        for (launch, rank, slot), handle in self.kept.items():
            self.send("kept", (handle,), launch=launch, rank=rank, slot=slot)
        self._thread = threading.Thread(target=self._listen, args=(self._socket,), daemon=True)
        self._thread.start()

    def send(self, kind: str, descriptors: tuple[int, ...] = (), **data: Any) -> None:
        """Send the flusher a message."""
        wire.send(self._socket, kind, descriptors=descriptors, **data)

    def drain(
        self, timeout_s: float = WAIT_S, lost: Sequence[int] = (), *, mirror: bool = False
    ) -> dict[str, Any]:
        """Ask the flusher to finish without the `lost` nodes, and wait for its reply."""
        self.heard = [message for message in self.heard if message["kind"] != "drained"]
        self.send("drain", timeout_s=timeout_s, lost=list(lost), mirror=mirror)
        wait_until(lambda: self.of_kind("drained"), "the answer to drain", timeout_s + 5)
        return self.of_kind("drained")[-1]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The flusher's messages of one kind, in order."""
        return [message for message in list(self.heard) if message["kind"] == kind]

    def signal(self, number: int) -> None:
        """Send the flusher a signal."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the flusher as the out-of-memory killer would."""
        self.process.kill()
        self.process.wait(WAIT_S)
        self._hang_up()

    def leave(self) -> int:
        """Close the connection and wait for the flusher to exit; returns its exit status."""
        self._hang_up()
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """End the flusher and release everything."""
        self._hang_up()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        for handle in self.kept.values():
            os.close(handle)
        self.kept.clear()
        if self._address >= 0:
            os.close(self._address)
            self._address = -1

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._socket.close()

    def _listen(self, connection: socket.socket) -> None:
        while True:
            try:
                found = wire.receive(connection)
            except OSError:
                return
            if found is None:
                return
            message, handles = found
            for handle in handles:
                key = message["launch"], message["rank"], message["slot"]
                former = self.kept.pop(key, None)
                if former is not None:
                    os.close(former)
                self.kept[key] = handle
            self.heard.append(message)
            if message["kind"] == "full":
                freed_bytes, detail = self.free_space()
                step = message["step"]
                wire.send(connection, "room", step=step, freed_bytes=freed_bytes, detail=detail)


class HasName(Protocol):
    """The only part of a flusher supervisor that a rank needs: the name to find its flusher by."""

    name: str


class FakeRank:
    """A rank that stages plain bytes as its only file; rank 0 adds the manifest's data."""

    def __init__(
        self,
        flusher_supervisor: HasName,
        run: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_ranks: int | None = None,
        node: int = 0,
        nodes: int = 1,
        launch: int = 1,
        data_bytes: int = 1 << 20,
        node_folder: str = "",
    ) -> None:
        self.run, self.rank, self.world_size, self.launch = run, rank, world_size, launch
        self.node, self.nodes, self.node_folder = node, nodes, node_folder
        self.local_ranks = local_ranks or world_size // nodes
        wait_until(lambda: self._dial(flusher_supervisor.name), "the flusher to listen")
        wire.send(
            self.connection,
            "hello",
            rank=rank,
            local_rank=rank % self.local_ranks,
            local_ranks=self.local_ranks,
            launch=launch,
        )
        assert wire.receive(self.connection) is not None
        self.slots = self._ask_for_slots(bytes=data_bytes)
        # Slots for files of the program, if the test uses them.
        self.file_slots: list[Slot] = []

    def describe(self, *keys: str) -> None:
        """Describe what this rank writes, as real ranks do after planning."""
        folder = RunPaths(self.run).attempt(1).launch(self.launch)
        wire.send(
            self.connection,
            "writes",
            folder=str(folder),
            node=self.node,
            nodes=self.nodes,
            local_ranks=self.local_ranks,
            files=[file["path"] for file in self.table(1, 0)["files"]],
            keys=keys[:1],
            keys_total=len(keys),
        )

    def leave(self) -> None:
        """End as planned, as the close of a session does."""
        wire.send(self.connection, "leaves")
        assert wire.receive(self.connection) is not None
        self.close()

    def snapshot(self, step: int, content: bytes, *, slot: int = 0) -> Slot:
        """Store the step's bytes in a slot as a snapshot."""
        staged = self.stage(step, content, slot=slot, seal=False)
        staged.seal(self.table(step, len(content)), is_snapshot=True)
        return staged

    def stage(self, step: int, content: bytes, *, slot: int = 0, seal: bool = True) -> Slot:
        """Fill a slot with the step's bytes and, unless told otherwise, seal it."""
        staged = self.slots[slot]
        staged.begin(step)
        staged.data[: len(content)] = content
        if seal:
            staged.seal(self.table(step, len(content)))
            with contextlib.suppress(OSError):
                wire.send(self.connection, "sealed", step=step)
        return staged

    def open_file_slots(self) -> None:
        """Get slots for files of the program."""
        self.file_slots = self._ask_for_slots(bytes=1 << 20, of_program=True)

    def stage_file(self, path: Path, content: bytes) -> Slot:
        """Fill and seal a slot with a file of the program."""
        slot = self.file_slots[0]
        slot.begin(1)
        slot.data[: len(content)] = content
        slot.seal({"path": str(path), "bytes": len(content)})
        return slot

    def table(self, step: int, size: int) -> dict[str, Any]:
        """The table that a rank writes for a sealed step."""
        name = str(CheckpointName(step, 1, self.launch))
        table = {
            "run_directory": str(self.run),
            "node_folder": self.node_folder,
            "checkpoint": name,
            "step": step,
            "rank": self.rank,
            "local_rank": self.rank % self.local_ranks,
            "local_ranks": self.local_ranks,
            "node": self.node,
            "nodes": self.nodes,
            "world_size": self.world_size,
            "staged_at": time.time(),
            "blocked_s": 0.25 * (self.rank + 1),
            "files": [{"path": f"__{self.rank}_0.distcp", "offset": 0, "bytes": size}],
        }
        if self.rank == 0:
            table["manifest"] = {
                "run_uid": "0" * 32,
                "run": self.run.name,
                "name": name,
                "step": step,
                "attempt": 1,
                "launch": self.launch,
                "world_size": self.world_size,
            }
        return table

    def close(self) -> None:
        """Disconnect like a rank that exits."""
        self.connection.close()
        for slot in (*self.slots, *self.file_slots):
            slot.close()

    def _ask_for_slots(self, **facts: Any) -> list[Slot]:
        wire.send(self.connection, "slots", **facts)
        answer = wire.receive(self.connection)
        assert answer is not None
        slots = [Slot(handle) for handle in answer[1]]
        for handle in answer[1]:
            os.close(handle)
        return slots

    def _dial(self, name: str) -> bool:
        try:
            self.connection = wire.connect(name, WAIT_S)
        except OSError:
            return False
        return True


def wait_for(slot: Slot, state: SlotState) -> None:
    """Wait until the flusher has brought the slot to `state`."""
    wait_until(lambda: slot.state is state, f"{state.name}, the slot is {slot.state.name}")


def fork(act: Callable[[int], None], argument: int) -> int:
    """Run `act(argument)` in a forked child that never returns here; its process id."""
    child = os.fork()
    if child == 0:
        try:
            act(argument)
        finally:
            os._exit(1)
    return child


def kill_process(pid: int) -> None:
    """SIGKILL, and wait for the end of a child."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
