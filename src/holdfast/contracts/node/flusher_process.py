"""What every flusher supervisor does: start the flusher, and keep the staging slots' descriptors.

The slots are memory files. While a flusher supervisor holds their descriptors, the death of a rank
or of the flusher loses no sealed step: a restarted flusher gets them back.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.node import wire

MODULE: Final = "holdfast.trainer.flusher"


def start_flusher(
    address: int,
    *,
    node: int,
    nodes: int,
    run: Path,
    log: Path,
    budget: int | None = None,
    hints: int | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a flusher. Return its process and the supervisor's end of their connection.

    `address` is the open address file: see `contracts.wire`. `budget` is the byte limit for all
    checkpoints of the run. `hints` is an eventfd by which an agent wakes it when another node's
    flusher has written or committed something.
    """
    ours, theirs = wire.pair()
    command = [sys.executable, "-m", MODULE, "--address-fd", str(address)]
    command += ["--node", str(node), "--nodes", str(nodes), "--run", str(run)]
    command += ["--supervisor-fd", str(theirs.fileno())]
    if budget is not None:
        command += ["--budget", str(budget)]
    inherited = [theirs.fileno(), address]
    if hints is not None:
        command += ["--hints-fd", str(hints)]
        inherited.append(hints)
    with theirs, open(log, "ab") as output:
        # Output goes to a file. The flusher outlives the ranks, and a reader of torchrun's
        # output would wait for it. Its own process session keeps torchrun's signals away.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=inherited,
            start_new_session=True,
            env=env,
        )
    return process, ours


class KeptSlots:
    """The descriptors of a node's slots, by rank, slot and launch. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[tuple[int, int, int], int] = {}

    def keep(self, message: Mapping[str, Any], handle: int) -> None:
        """Keep the slot of the flusher's message `keep`, in place of an earlier one."""
        key = (int(message["rank"]), int(message["slot"]), int(message["launch"]))
        with self._lock:
            former = self._handles.pop(key, None)
            if former is not None:
                os.close(former)
            self._handles[key] = handle

    def give_back(self, connection: socket.socket) -> None:
        """Send every slot to a restarted flusher. If it has ended, the next one gets them.

        Slots with files of the program have the lowest numbers. They come first, because the
        flusher writes a file before the steps that were sealed after it.
        """
        with self._lock:
            by_slot = sorted(self._handles.items(), key=lambda item: item[0][1])
            for (rank, slot, launch), handle in by_slot:
                facts = {"rank": rank, "slot": slot, "launch": launch}
                with contextlib.suppress(OSError):
                    wire.send(connection, "kept", descriptors=(handle,), **facts)

    def release(self, launch: int = sys.maxsize) -> None:
        """Close the slots of `launch` and of all launches before it."""
        with self._lock:
            for key in [key for key in self._handles if key[2] <= launch]:
                os.close(self._handles.pop(key))
