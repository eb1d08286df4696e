"""Messages between the processes of one node: JSON packets on Unix sockets, with descriptors.

Two conversations use it, both with the flusher:

rank → flusher, on the abstract socket named by `HOLDFAST_FLUSHER`
    hello  {rank, local_rank, local_ranks, incarnation}            → welcome {}
    slots  {bytes, used_bytes}    → slots {numbers} with `SLOTS_PER_RANK` descriptors; the first
                        `used_bytes` of each are allocated after the answer
    sealed {step}                                                  (no answer: see the slot)
    skipped {step}                     no slot was free: the step cannot become complete here

keeper (the agent, or the Session that started the flusher) ↔ flusher, on an inherited socket
    keep   {rank, slot, incarnation} with a descriptor             flusher → keeper
    kept   {rank, slot, incarnation} with a descriptor             keeper → a flusher started anew
    drain  {timeout_s, lost: [nodes], mirror}
           → drained {committed: [steps], failed: [{step, error}], unmirrored: [checkpoints]}
           with `mirror`, what was committed is waited for in the mirror too
    committed {step, checkpoint, bytes, flush_s, is_salvaged} / failed {step, checkpoint, error}
                                                                   flusher → keeper, as they occur;
                        `is_salvaged`: a snapshot, committed because its ranks are gone
    full {step, bytes, error}  → room {step, freed_bytes, detail}      the step does not fit: one
                        that knows the keep rules frees what they allow; every keeper answers
    A slot that no rank will fill again is cut to `DATA_OFFSET` bytes by the flusher, which frees
    its memory although a keeper still holds it; such a one need not be given back.
    The keeper closing its end tells the flusher to finish what is sealed and leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from typing import Any, Final

MESSAGE_BYTES_MAX: Final = 60_000
DESCRIPTORS_MAX: Final = 8
SOCKET_KIND: Final = socket.SOCK_SEQPACKET


def listen(name: str) -> socket.socket:
    """A listening socket with the abstract name `name`: no file is left behind.

    Raises `OSError` when somebody listens under that name already.
    """
    listener = socket.socket(socket.AF_UNIX, SOCKET_KIND)
    try:
        listener.bind(f"\0{name}")
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(name: str, timeout_s: float) -> socket.socket:
    """A connection to the listener `name`; raises `OSError` when nobody listens."""
    connection = socket.socket(socket.AF_UNIX, SOCKET_KIND)
    connection.settimeout(timeout_s)
    try:
        connection.connect(f"\0{name}")
    except BaseException:
        connection.close()
        raise
    return connection


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, for a keeper and the flusher it starts."""
    return socket.socketpair(socket.AF_UNIX, SOCKET_KIND)


def is_same_user(connection: socket.socket) -> bool:
    """True when the peer process runs as this user, as the kernel says."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def send(
    connection: socket.socket, kind: str, *, descriptors: tuple[int, ...] = (), **data: Any
) -> None:
    """Send one message; raises `OSError` when the peer is gone."""
    content = json.dumps({"kind": kind, **data}).encode()
    if len(content) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(content)} bytes: expected {MESSAGE_BYTES_MAX} or less")
    if descriptors:
        socket.send_fds(connection, [content], list(descriptors))
    else:
        connection.send(content)


def receive(connection: socket.socket) -> tuple[dict[str, Any], tuple[int, ...]] | None:
    """The next message and its descriptors (now ours to close), or None at the end.

    Raises `TimeoutError` after the connection's own time-out.
    """
    try:
        content, descriptors, _, _ = socket.recv_fds(
            connection, MESSAGE_BYTES_MAX + 1, DESCRIPTORS_MAX
        )
    except ConnectionError:
        return None
    for descriptor in descriptors:
        # A program that this process starts must not keep a slot's memory alive.
        os.set_inheritable(descriptor, False)
    if not content:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        return None
    message: dict[str, Any] = json.loads(content)
    return message, tuple(descriptors)
