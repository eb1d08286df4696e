"""How two nodes of an attempt find each other, and prove that they belong to it.

Node 0 writes its addresses and a random token to a file in the attempt's folder that only the run's
user can read. Each end sends a nonce, and answers the other's with an HMAC-SHA256 over both nonces.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import random
import secrets
import socket
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.reading import open_regular
from holdfast.contracts.errors import AgreementError

NONCE_BYTES: Final = 32
ADDRESS_BYTES_MAX: Final = 64 * 1024
# root has full access anyway.
TRUSTED_USERS: Final = frozenset({0})


class Proof:
    """One end's part of a handshake.

    Send `opening`. Answer the other end's opening with `answer`, and give its answer to `check`.
    """

    def __init__(self, token: bytes, *, is_host: bool) -> None:
        self._token = token
        # Each answer contains the role of its sender, so it cannot be sent back to its sender.
        self._own, self._other = (b"host", b"member") if is_host else (b"member", b"host")
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.opening = {"nonce": self._nonce.hex()}

    def answer(self, opening: dict[str, Any]) -> dict[str, Any]:
        """Return the proof that this end knows the token."""
        theirs = bytes.fromhex(opening["nonce"])
        return {"proof": hmac.digest(self._token, self._own + theirs, "sha256").hex()}

    def check(self, answer: dict[str, Any]) -> None:
        """Raise `PermissionError` unless the other end knows the token."""
        expected = hmac.digest(self._token, self._other + self._nonce, "sha256")
        if not hmac.compare_digest(bytes.fromhex(answer["proof"]), expected):
            raise PermissionError("the other end does not know the attempt's token")


def parse_ports(text: str) -> range | None:
    """Return the ports of `FIRST-LAST`, as in `supervision.ports`; None for `any`."""
    if text == "any":
        return None
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def listen(ports: range | None, backlog: int) -> socket.socket:
    """Return a listening socket, for IPv6 and IPv4 if possible, on a port of `ports` or any.

    Raises `AgreementError` if all are in use.
    """
    tries = [0] if ports is None else random.sample(ports, len(ports))
    problem: OSError | None = None
    for port in tries:
        for family in (socket.AF_INET6, socket.AF_INET):
            is_dual = family == socket.AF_INET6
            if is_dual and not socket.has_dualstack_ipv6():
                continue
            try:
                return socket.create_server(
                    ("", port), family=family, backlog=backlog, dualstack_ipv6=is_dual
                )
            except OSError as error:
                problem = error
                if error.errno == errno.EADDRINUSE:
                    break
    raise AgreementError(
        f"no free port to listen on for the other nodes: {problem}; "
        f"tried {'any' if ports is None else f'{ports.start} to {ports.stop - 1}'}"
    )


def own_addresses() -> list[str]:
    """Return the names and addresses by which other nodes may reach this one, best first."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def read_address(path: Path) -> tuple[list[str], int, bytes]:
    """Return node 0's addresses, port and token.

    Raises `FileNotFoundError` while there is no file, `PermissionError` for another user's file,
    and `ValueError`, `LookupError` or `TypeError` for an invalid one.
    """
    document = json.loads(_read_own(path))
    return document["addresses"], int(document["port"]), bytes.fromhex(document["token"])


def _read_own(path: Path) -> bytes:
    """Return the content of `path`. Raises `PermissionError` for another user's file.

    The writer of this file controls the node, because the node runs what the listener asks for.
    """
    handle = open_regular(path)
    with os.fdopen(handle, "rb") as stream:
        owner = os.fstat(handle).st_uid
        if owner not in {os.geteuid(), *TRUSTED_USERS}:
            raise PermissionError(f"{path} belongs to user {owner}, expected {os.geteuid()}")
        return stream.read(ADDRESS_BYTES_MAX)
