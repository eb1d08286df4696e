"""The supervisor of a node's flusher if there is no agent: a thread of local rank 0.

It holds the descriptors of the staging slots, so that a flusher that was killed can be restarted
and finish the sealed steps. When its connection closes, even by a crash, the flusher finishes its
work and exits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.errors import PreflightError, RunConflictError
from holdfast.contracts.node import wire
from holdfast.contracts.node.flusher_process import KeptSlots, start_flusher

RESTARTS_MAX: Final = 3
START_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 60.0
MIRROR_TIMEOUT_S: Final = 1800.0
FORMER_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.02


class FlusherSupervisor:
    """Starts a flusher, restarts it up to `RESTARTS_MAX` times, and ends it."""

    def __init__(
        self,
        place: Path,
        *,
        node: int,
        nodes: int,
        log: Path,
        run: Path,
        address: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the flusher. `place` is its new address file: see `contracts.wire`.

        `address` is a descriptor of `place` if that file is open already. It is closed at the end.
        Raises `PreflightError` if the flusher does not answer within `START_TIMEOUT_S`.
        """
        self._place, self._node, self._nodes = place, node, nodes
        self._log, self._run = log, run
        has_mirror = bool(Tiers.from_environment(os.environ).mirror)
        # Where there is a mirror, the last step is complete only with its copy, which takes as long
        # as the network needs.
        self._end_timeout_s = MIRROR_TIMEOUT_S if has_mirror else END_TIMEOUT_S
        self._kept = KeptSlots()
        self._is_closing = False
        make_directory(log.parent)
        make_directory(place.parent)
        # The file is new and only this user can open it. In a folder that others may write, a link
        # there must not lead the flusher elsewhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._address = os.open(place, flags, 0o600) if address is None else address
        self._env = env
        self._process, self._socket = self._start()
        self._wait_until_it_answers()
        self._thread = threading.Thread(target=self._keep, name="holdfast-flusher", daemon=True)
        self._thread.start()

    def close(self, *, wait: bool) -> None:
        """Disconnect. With `wait`, wait for the flusher to finish, including copies to a mirror.

        The wait is at most `END_TIMEOUT_S`, or `MIRROR_TIMEOUT_S` with a mirror.
        """
        self._is_closing = True
        # `shutdown` and not only `close`: the thread is blocked in a receive on this socket, and a
        # close by another thread does not wake it.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(END_TIMEOUT_S)
        self._socket.close()
        if wait:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._end_timeout_s)
        self._kept.release()
        os.close(self._address)

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        return start_flusher(
            self._address,
            node=self._node,
            nodes=self._nodes,
            run=self._run,
            log=self._log,
            env=self._env,
        )

    def _wait_until_it_answers(self) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while listener_of(self._place) != self._process.pid:
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise PreflightError(
                    f"the flusher did not start within {START_TIMEOUT_S:.0f} s "
                    f"(exit status {self._process.poll()}); see {self._log}"
                )
            time.sleep(POLL_S)

    def _keep(self) -> None:
        for _ in range(RESTARTS_MAX + 1):
            self._hold_until_hang_up()
            if self._is_closing:
                return
            # Two flushers of one node must not write the same files. The former may hang with its
            # socket closed.
            self._end_former()
            self._socket.close()
            self._process, self._socket = self._start()
            # If the new flusher dies immediately, the next iteration restarts it.
            # The slots survived in this process's descriptors, so the new flusher can still write
            # the steps that were sealed, see decision 2.
            self._kept.give_back(self._socket)

    def _end_former(self) -> None:
        """Wait for the disconnected flusher to exit, to free its address for the next one."""
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hold_until_hang_up(self) -> None:
        while (packet := wire.receive(self._socket)) is not None:
            message, descriptors = packet
            if message["kind"] == "full":
                self._answer_full(message["step"])
            elif message["kind"] == "keep":
                # A second holder of the memory: without it, the kernel would free the slot with the
                # flusher and the rank, see decision 2.
                self._kept.keep(message, descriptors[0])

    def _answer_full(self, step: int) -> None:
        """Answer that nothing was deleted: without an agent there are no keep rules."""
        text = (
            "no agent is running to delete checkpoints by the keep rules; delete files that you do "
            "not need"
        )
        with contextlib.suppress(OSError):
            wire.send(self._socket, "room", step=step, freed_bytes=0, detail=text)


def listener_of(place: Path) -> int | None:
    """Return the pid of the flusher that listens at the file `place`, or None without one."""
    try:
        with wire.connect(place, START_TIMEOUT_S) as connection:
            return wire.peer_of(connection)[0]
    except OSError:
        return None


def wait_for_former(place: Path, run: Path) -> None:
    """Wait until the previous launch's flusher has finished its sealed steps.

    Raises `RunConflictError` after `FORMER_TIMEOUT_S`: another launch still trains in this run.
    """
    give_up = time.monotonic() + FORMER_TIMEOUT_S
    while listener_of(place) is not None:
        if time.monotonic() > give_up:
            raise RunConflictError(
                f"{run}: another launch of this program is still alive after "
                f"{FORMER_TIMEOUT_S:.0f} s; end it, or give this one another directory"
            )
        time.sleep(POLL_S)
