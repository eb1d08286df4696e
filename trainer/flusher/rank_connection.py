"""A rank as the flusher sees it: its connection, who it said it is, and how its death is told."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from holdfast.trainer.flusher.plan import SlotKey


@dataclass
class RankConnection:
    """A connected rank, as its hello said; `process` is a descriptor that tells its death."""

    connection: socket.socket
    process: int | None
    rank: int = -1
    local_rank: int = -1
    launch: int = 0
    slots: tuple[SlotKey, ...] = ()


def open_process(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the peer's process ends, where the kernel has it.

    A rank's forked children hold its socket open, so the socket alone may tell too late.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    try:
        return os.pidfd_open(int.from_bytes(credentials[:4], sys.byteorder))
    except OSError:
        return None
