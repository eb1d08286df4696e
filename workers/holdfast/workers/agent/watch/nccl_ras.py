"""Asks NCCL's RAS what it knows about the ranks, and reads its answer.

Each process with NCCL 2.24 or newer has a RAS thread. All of them know the whole job, and those of
a node listen at one address. So one node asks. The agent of that node stores the answer in the
dump, and node 0 reads it from there. A rank that has no RAS, or has turned it off, is not asked.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.disk.durable import write_bytes
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import ForeignFileError
from holdfast.workers.agent.watch.ras_answer import describe, has_timeouts, read_answer

ADDRESS: Final = "NCCL_RAS_ADDR"
DEFAULT_ADDRESS: Final = "localhost:28028"
FILE: Final = "nccl-ras.txt"
CUT_FILE: Final = "nccl-ras.cut.txt"
# One node asks with each of a suspicion's first samples, until one has an answer.
NODES_MAX: Final = 3
# RAS waits this long for processes that do not answer, and for five seconds more at most.
GATHER_S: Final = 2
ANSWER_S_MAX: Final = 10.0
# Processes that RAS reaches only through a lost one do not answer. It soon finds another way.
AGAIN_AFTER_S: Final = 6.0
# Another job's process may answer, and a stopped one accepts connections. The next may be another.
HELLO_S_MAX: Final = 1.0
TRIES: Final = 40
LINE_BYTES_MAX: Final = 4096
ANSWER_BYTES_MAX: Final = 8 << 20
RECEIVE_BYTES: Final = 1 << 16
READ_S_MAX: Final = 2 * ANSWER_S_MAX + AGAIN_AFTER_S + 10.0
POLL_S: Final = 0.25


def start_asking(pids: Sequence[int], folder: Path, number: int) -> bool:
    """Start to ask the ranks of a node, and return True if this is its turn and they have RAS.

    `folder` is the node's folder of a dump, and `number` counts the dump's samples. Node 0 asks
    with the first one, and node 1 with the second one if there is no answer yet.
    """
    name, _, dump = folder.name.rpartition("-")
    if number > NODES_MAX or name != f"node-{number - 1:04d}":
        return False
    if _answers(folder.parent, dump):
        return False
    address = _find_address(pids)
    if address is None:
        return False
    threading.Thread(
        target=_store, args=(address, pids, folder), name="nccl-ras", daemon=True
    ).start()
    return True


def _find_address(pids: Sequence[int]) -> tuple[str, int] | None:
    """Return where a process listens for RAS clients, or None. No other program is asked."""
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            text = psutil.Process(pid).environ().get(ADDRESS, DEFAULT_ADDRESS)
            host, _, port = text.rpartition(":")
            for one in _connections(pid):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == int(port):
                    return host.strip("[]"), int(port)
    return None


def _connections(pid: int) -> Iterator[Any]:
    with contextlib.suppress(psutil.Error, OSError):
        yield from psutil.Process(pid).net_connections(kind="tcp")


def _store(address: tuple[str, int], pids: Sequence[int], folder: Path) -> None:
    """Ask, and write what comes into the dump. Without an answer, nothing is written."""
    answer, is_whole = _ask(address, pids)
    if is_whole and has_timeouts(answer):
        time.sleep(AGAIN_AFTER_S)
        again, is_again_whole = _ask(address, pids)
        answer = again if is_again_whole else answer
    if answer:
        with contextlib.suppress(OSError):
            write_bytes(folder / (FILE if is_whole else CUT_FILE), answer, mode=0o600)


def _ask(address: tuple[str, int], pids: Sequence[int]) -> tuple[bytes, bool]:
    """Return what a process answers, and whether it came to its end."""
    give_up = time.monotonic() + ANSWER_S_MAX
    for _ in range(TRIES):
        with (
            # `ValueError` is for a host that is no name.
            contextlib.suppress(OSError, ValueError),
            socket.create_connection(address, timeout=HELLO_S_MAX) as connection,
        ):
            if _greet(connection, pids):
                return _receive(connection, give_up)
        if time.monotonic() > give_up:
            break
    return b"", False


def _greet(connection: socket.socket, pids: Sequence[int]) -> bool:
    """Agree on the form of the answer and request it. Return False if these are not our ranks.

    All processes of a user on a node listen at the same address, those of another job too.
    """
    if not _say(connection, "CLIENT PROTOCOL 2").startswith(b"SERVER PROTOCOL "):
        return False
    own = connection.getsockname()[:2]
    if not any(tuple(one.raddr) == own for pid in pids for one in _connections(pid)):
        return False
    _say(connection, f"TIMEOUT {GATHER_S}")
    # NCCL before 2.28.7 answers that it does not know this command, and then answers in text.
    _say(connection, "SET FORMAT json")
    connection.sendall(b"VERBOSE STATUS\n")
    return True


def _say(connection: socket.socket, command: str) -> bytes:
    """Send a command and return the line that answers it. Raises `OSError` without one."""
    connection.sendall(f"{command}\n".encode())
    line = bytearray()
    give_up = time.monotonic() + HELLO_S_MAX
    while not line.endswith(b"\n"):
        if not _receive_once(connection, line, give_up) or len(line) > LINE_BYTES_MAX:
            raise ConnectionError("no line")
    return bytes(line)


def _receive(connection: socket.socket, give_up: float) -> tuple[bytes, bool]:
    """Return what comes, and whether it came to its end."""
    answer = bytearray()
    with contextlib.suppress(OSError):
        while len(answer) <= ANSWER_BYTES_MAX:
            if not _receive_once(connection, answer, give_up):
                return bytes(answer), bool(answer)
    return bytes(answer[:ANSWER_BYTES_MAX]), False


def _receive_once(connection: socket.socket, into: bytearray, give_up: float) -> bool:
    """Append the next bytes, and return False at the end. Raises `OSError` after `give_up`."""
    left_s = give_up - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    connection.settimeout(left_s)
    received = connection.recv(RECEIVE_BYTES)
    into += received
    return bool(received)


class AnswerReader:
    """Reads the answer of a dump in a thread, once a node has stored it."""

    def __init__(
        self, attempt: AttemptPaths, dump: int, pids: Mapping[int, int], world_size: int
    ) -> None:
        """`pids` has the process of each rank."""
        self.finding = ""
        self._attempt, self._dump = attempt, dump
        self._pids, self._world_size = pids, world_size
        threading.Thread(target=self._run, name="nccl-ras-answer", daemon=True).start()

    def _run(self) -> None:
        give_up = time.monotonic() + READ_S_MAX
        while time.monotonic() < give_up:
            time.sleep(POLL_S)
            for path in _answers(self._attempt.dumps, f"{self._dump:02d}"):
                with contextlib.suppress(OSError):
                    self.finding = self._read(path)
                    return

    def _read(self, path: Path) -> str:
        try:
            content = read_bounded(path, ANSWER_BYTES_MAX)
            if path.name == CUT_FILE:
                raise ValueError("it did not come to its end")
            found = describe(read_answer(content), self._pids, self._world_size)
        except (ForeignFileError, ValueError) as error:
            return f"the answer of NCCL RAS in {path.name} cannot be read: {error}"
        return f"by NCCL RAS, {found}" if found else ""


def _answers(dumps: Path, dump: str) -> list[Path]:
    return [path for name in (FILE, CUT_FILE) for path in dumps.glob(f"node-*-{dump}/{name}")]
