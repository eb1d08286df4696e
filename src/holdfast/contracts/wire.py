"""Messages between the processes of one node: JSON packets on Unix sockets, with descriptors.

Two conversations use it, both with the flusher:

rank → flusher, on the abstract socket whose name is in the file that `HOLDFAST_FLUSHER` names
    hello  {rank, local_rank, local_ranks, launch}            → welcome {}
    slots  {bytes, used_bytes}    → slots {numbers} with `SLOTS_PER_RANK` descriptors; the first
                        `used_bytes` of each are allocated after the answer
    sealed {step}                                                  (no answer: see the slot)
    skipped {step}                     no slot was free: the step cannot become complete here

flusher supervisor (the agent, or the Session that started the flusher) ↔ flusher, on an inherited
socket
    keep   {rank, slot, launch} with a descriptor             flusher → flusher supervisor
    kept   {rank, slot, launch} with a descriptor             flusher supervisor → a flusher started
    again drain  {number, timeout_s, lost: [nodes], mirror}
           → drained {number, is_done, committed: [steps], failed: [{step, error}],
                      unmirrored: [checkpoints]}, the newest of each that a message has room for;
           with `mirror`, what was committed is waited for in the mirror too
    committed {step, checkpoint, bytes, flush_s, is_salvaged} / failed {step, checkpoint, error}
                                                                   flusher → flusher supervisor, as
                                                                   they occur;
                        `is_salvaged`: a snapshot, committed because its ranks are gone
    full {step, bytes, error}  → room {step, freed_bytes, detail}      the step does not fit: one
                        that knows the keep rules frees what they allow; every flusher supervisor
                        answers
    A slot that no rank will fill again is cut to `DATA_OFFSET` bytes by the flusher, which frees
    its memory although a flusher supervisor still holds it; such a one need not be given back.
    The flusher supervisor closing its end tells the flusher to finish what is sealed and leave.

Anybody on the machine can listen under an abstract name and connect to one. So a flusher chooses
a random name, again at each start, and writes it to a file of the run's user. Both ends ask the
kernel for the other's user, and hang up on any other user than their own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

MESSAGE_BYTES_MAX: Final = 60_000
DESCRIPTORS_MAX: Final = 8
NAME_BYTES_MAX: Final = 100
SOCKET_KIND: Final = socket.SOCK_SEQPACKET


def name_prefix(run: Path | None) -> str:
    """How the names of a run's sockets begin, for whoever looks for sockets that were left."""
    return f"holdfast-{sha256(os.fsencode(run or '')).hexdigest()[:12]}-"


def listen(address: int, run: Path | None = None) -> socket.socket:
    """A socket that listens under a new random name, which is written to the file `address`.

    `address` is an open descriptor. Raises `OSError` when the name cannot be written.
    """
    name = (name_prefix(run) + secrets.token_hex(16)).encode()
    listener = socket.socket(socket.AF_UNIX, SOCKET_KIND)
    try:
        listener.bind(b"\0" + name)
        listener.listen(1024)
        os.ftruncate(address, 0)
        os.pwrite(address, name, 0)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(place: str | Path, timeout_s: float) -> socket.socket:
    """A connection to the listener whose name is in the file at `place`.

    Raises `OSError` when nobody listens, and its subclass `PermissionError` when another user
    does; nothing has been said to that one.
    """
    handle = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        name = os.read(handle, NAME_BYTES_MAX)
    finally:
        os.close(handle)
    if not name:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"{place} has no socket's name yet")
    connection = socket.socket(socket.AF_UNIX, SOCKET_KIND)
    connection.settimeout(timeout_s)
    try:
        connection.connect(b"\0" + name)
        if not is_same_user(connection):
            raise PermissionError(
                errno.EACCES,
                f"user {peer_of(connection)[1]} listens on the socket named in {place}; "
                f"expected user {os.geteuid()}",
            )
    except BaseException:
        connection.close()
        raise
    return connection


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, for a flusher supervisor and the flusher it starts."""
    return socket.socketpair(socket.AF_UNIX, SOCKET_KIND)


def is_same_user(connection: socket.socket) -> bool:
    """True when the peer process runs as this user, as the kernel says."""
    return peer_of(connection)[1] == os.geteuid()


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(process, user) that the kernel saw at the other end, when it listened or connected."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process, user, _ = struct.unpack("3i", credentials)
    return int(process), int(user)


def send(
    connection: socket.socket, kind: str, *, descriptors: tuple[int, ...] = (), **data: Any
) -> None:
    """Send one message.

    Raises `OSError` when the peer is gone, `ValueError` when the message is too long.
    """
    content = json.dumps({"kind": kind, **data}).encode()
    if len(content) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(content)} bytes: expected {MESSAGE_BYTES_MAX} or less")
    if descriptors:
        socket.send_fds(connection, [content], list(descriptors))
    else:
        connection.send(content)


def clip(text: str, bytes_max: int) -> str:
    """The beginning of `text` that takes up at most `bytes_max` bytes in a message."""
    while len(json.dumps(text)) > bytes_max:
        text = text[: len(text) * 3 // 4]
    return text


def newest_that_fit(items: Sequence[Any], bytes_max: int) -> list[Any]:
    """The last of `items` that take up at most `bytes_max` bytes in a message; older ones go."""
    kept: list[Any] = []
    used = 0
    for item in reversed(items):
        used += len(json.dumps(item)) + 2
        if used > bytes_max:
            break
        kept.append(item)
    return kept[::-1]


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
