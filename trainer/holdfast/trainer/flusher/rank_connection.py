"""A rank's connection to the flusher, and how the flusher detects the rank's death."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from holdfast.contracts.node import wire
from holdfast.trainer.flusher.plan import SlotKey


@dataclass
class RankConnection:
    """A connected rank, as its `hello` describes it. `process` is the rank's pidfd, if any."""

    connection: socket.socket
    process: int | None
    rank: int = -1
    local_rank: int = -1
    launch: int = 0
    slots: tuple[SlotKey, ...] = ()


def open_process(connection: socket.socket) -> int | None:
    """Return a descriptor that becomes readable when the peer's process ends, None if unsupported.

    Its forked children keep its socket open, so the socket alone may report the end too late.
    """
    try:
        return os.pidfd_open(wire.peer_of(connection)[0])
    except OSError:
        return None
