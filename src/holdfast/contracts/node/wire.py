"""Messages between the processes of one node: JSON packets on Unix sockets, with descriptors.

There are two connections, both to the flusher.

Rank → flusher, on the abstract socket whose name is in the file `HOLDFAST_FLUSHER`:

    hello {rank, local_rank, local_ranks, launch} → welcome {}
    slots {bytes, used_bytes, count, directory} → slots {numbers, problem}, with `count` descriptors
        The flusher allocates the first `used_bytes` of each slot after its answer. With a
        `directory`, the slots are files on that disk. `problem` says why there are none.
    release {of_program} → released {left}
        The rank's slots are freed before it asks for others. Of these, `left` are still in use.
    sealed {step}
        No answer; the slot's state has the result.
    hurry {step}
        Training waits: steps up to this one are written at full speed. No answer.
    leaves {} → left {}
        The rank ends as planned, and its snapshots are discarded.

Flusher supervisor (the agent, or the session that started the flusher) ↔ flusher, on an inherited
socket:

    keep {rank, slot, launch}, with a descriptor: flusher → flusher supervisor
    kept {rank, slot, launch}, with a descriptor: flusher supervisor → restarted flusher
    drain {number, timeout_s, lost: [nodes], mirror}: flusher supervisor → flusher
        → drained {number, is_done, committed: [steps], failed: [{step, error}],
                   unmirrored: [checkpoints]}
        Each list has the newest entries that fit into the message. With `mirror`, the flusher also
        waits until committed steps are mirrored.
    neighbour {launch, node, holder, folder, ports, addresses}: flusher supervisor → flusher
        Snapshots of the launch are copied to node `holder`. `folder` is the launch's, where the
        flushers find each other. `ports` is as in a spec, and `addresses` are this node's.
    copy {launch, round, keep}: flusher supervisor → flusher
        Copy the first snapshot from step `round` on, and keep the copies of step `keep` besides.
        The first round, 0, begins without this message.
    protected {launch, holder, round, step, problem, is_missed}: flusher → flusher supervisor
        The neighbour holds a copy of `step`, or -1 because of `problem`. `is_missed`: the ranks had
        passed the round's step.
    committed {step, checkpoint, bytes, flush_s, is_salvaged}: flusher → flusher supervisor
        `is_salvaged`: a snapshot that was committed because its ranks died.
    failed {step, checkpoint, error}: flusher → flusher supervisor
    full {step, bytes, error}: flusher → flusher supervisor
        → room {step, freed_bytes, detail}
        The step does not fit. A flusher supervisor that knows the keep rules deletes what they
        allow. Every flusher supervisor answers.

When no rank will fill a slot again, the flusher truncates it to `DATA_OFFSET` bytes. That frees its
memory although the flusher supervisor still holds the descriptor. Such a slot need not be passed to
a restarted flusher. When the flusher supervisor closes its end, the flusher finishes the sealed
steps and exits.

Any user of the machine can listen on an abstract name and connect to one. So each flusher chooses a
new random name at its start and writes it to a file of the run's user. Both ends ask the kernel for
the user of the other end, and close the connection if it is not their own.
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
    """Return the prefix of a run's socket names, to find sockets that were left behind."""
    return f"holdfast-{sha256(os.fsencode(run or '')).hexdigest()[:12]}-"


def listen(address: int, run: Path | None = None) -> socket.socket:
    """Return a socket that listens on a new random name, and write the name to a file.

    `address` is an open descriptor of the file. Raises `OSError` if it cannot be written.
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
    """Return a connection to the listener whose name is in the file at `place`.

    Raises `OSError` if no process listens, and its subclass `PermissionError` if another user
    does. In that case nothing has been sent.
    """
    handle = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        name = os.read(handle, NAME_BYTES_MAX)
    finally:
        os.close(handle)
    if not name:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"{place} contains no socket name yet")
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
    """Return two connected ends, for a flusher supervisor and the flusher that it starts."""
    return socket.socketpair(socket.AF_UNIX, SOCKET_KIND)


def is_same_user(connection: socket.socket) -> bool:
    """Return True if the peer process runs as this user, according to the kernel."""
    return peer_of(connection)[1] == os.geteuid()


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (process id, user id) of the other end, as of when it listened or connected."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process, user, _ = struct.unpack("3i", credentials)
    return int(process), int(user)


def send(
    connection: socket.socket, kind: str, *, descriptors: tuple[int, ...] = (), **data: Any
) -> None:
    """Send one message.

    Raises `OSError` if the peer is gone, `ValueError` if the message is too long.
    """
    content = json.dumps({"kind": kind, **data}).encode()
    if len(content) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {len(content)} bytes: expected at most {MESSAGE_BYTES_MAX}")
    if descriptors:
        socket.send_fds(connection, [content], list(descriptors))
    else:
        connection.send(content)


def clip(text: str, bytes_max: int) -> str:
    """Return the start of `text` that takes at most `bytes_max` bytes in a message."""
    while len(json.dumps(text)) > bytes_max:
        text = text[: len(text) * 3 // 4]
    return text


def newest_that_fit(items: Sequence[Any], bytes_max: int) -> list[Any]:
    """Return the last of `items` that take at most `bytes_max` bytes in a message."""
    kept: list[Any] = []
    used = 0
    for item in reversed(items):
        used += len(json.dumps(item)) + 2
        if used > bytes_max:
            break
        kept.append(item)
    return kept[::-1]


def receive(connection: socket.socket) -> tuple[dict[str, Any], tuple[int, ...]] | None:
    """Return the next message and its descriptors, or None at the end of the connection.

    The caller must close the descriptors. Raises `TimeoutError` after the connection's timeout.
    """
    try:
        content, descriptors, _, _ = socket.recv_fds(
            connection, MESSAGE_BYTES_MAX + 1, DESCRIPTORS_MAX
        )
    except ConnectionError:
        return None
    for descriptor in descriptors:
        # Child processes must not keep a slot's memory alive.
        os.set_inheritable(descriptor, False)
    if not content:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        return None
    message: dict[str, Any] = json.loads(content)
    return message, tuple(descriptors)
