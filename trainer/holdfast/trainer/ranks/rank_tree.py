"""Messages between the ranks of a program over a tree of sockets. It needs no torch.

A rank is connected to its parent and to at most `FAN_OUT` children, so its descriptors do not grow
with the number of ranks. If a rank ends, its neighbours see that immediately, and they pass an
error that names it on to all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

import psutil

from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node.handshake import Proof, listen, own_addresses

# One connection between two ranks: the proof that both belong to the job, and whole messages.

READ_BYTES: Final = 1 << 20
HELLO_BYTES_MAX: Final = 4096
GREET_S: Final = 5.0
DIAL_S: Final = 5.0
ANSWER_S: Final = 30.0
DIAL_NAP_S: Final = 0.05
# A host that no longer answers is noticed after three minutes.
KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 8),
)
_HEAD: Final = struct.Struct("<BQ")


class _Kind(IntEnum):
    MESSAGE = 0
    FAILED = 1
    LEFT = 2


class NeighbourLink:
    """A connected neighbour. `messages` are those that have arrived, oldest first.

    With `has_left`, it has closed its end in an orderly way.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self.messages: deque[bytes] = deque()
        self.has_left = False
        self._socket, self._arrived = connected, bytearray()
        connected.settimeout(timeout_s)
        # Messages are small and each one is awaited. Nagle's algorithm would hold them back.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A host that lost its power closes no connection. Without probes, others would wait for 30
        # minutes, see decision 59.
        for option, value in KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def handle(self) -> int:
        """The file descriptor."""
        return self._socket.fileno()

    def send(self, content: bytes) -> None:
        """Send a message. Raises `OSError` if the neighbour has ended or does not take it."""
        self._send(_Kind.MESSAGE, content)

    def hear(self) -> str:
        """Take what has arrived. Return the problem that the neighbour passes on, or "".

        Raises `OSError` if the neighbour has ended without leaving.
        """
        # Whatever has arrived is taken, and a message may arrive in pieces. A blocking read for the
        # rest would let this rank miss the end of another neighbour.
        arrived = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        if not arrived:
            raise ConnectionResetError("closed")
        self._arrived += arrived
        while len(self._arrived) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._arrived)
            end = _HEAD.size + size
            if len(self._arrived) < end:
                break
            content = bytes(memoryview(self._arrived)[_HEAD.size : end])
            del self._arrived[:end]
            if kind == _Kind.FAILED:
                return content.decode(errors="replace")
            if kind == _Kind.LEFT:
                self.has_left = True
                break
            self.messages.append(content)
        return ""

    def leave(self) -> None:
        """Close this end in an orderly way."""
        self._last(_Kind.LEFT, b"")

    def fail(self, problem: str) -> None:
        """Pass a problem on, and close this end."""
        self._last(_Kind.FAILED, problem.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close this process's descriptor only."""
        self._socket.close()

    def _last(self, kind: _Kind, content: bytes) -> None:
        # The neighbour may have ended, or may not read any more.
        with contextlib.suppress(OSError):
            # A neighbour that does not read must not delay this rank's end by the whole timeout.
            self._socket.settimeout(GREET_S)
            self._send(kind, content)
        self._socket.close()

    def _send(self, kind: _Kind, content: bytes) -> None:
        head = _HEAD.pack(kind, len(content))
        # One small write instead of two, but no copy of a large message.
        if len(content) < READ_BYTES:
            self._socket.sendall(head + content)
        else:
            self._socket.sendall(head)
            self._socket.sendall(content)


def dial(
    addresses: Sequence[str], port: int, token: bytes, hello: dict[str, Any], give_up: float
) -> socket.socket | None:
    """Return a connection to the rank that listens at one of `addresses`, or None if there is none.

    It tries all of them until `give_up`, a monotonic time. Both ends prove that they know `token`.
    """
    while time.monotonic() < give_up:
        for address in addresses:
            # A stranger on the port, an address on another network and a rank that does not listen
            # yet are all the same here: try again until the time is over.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                connected = socket.create_connection((address, port), timeout=DIAL_S)
                try:
                    # The other end accepts once it is connected itself. A stranger never answers.
                    connected.settimeout(ANSWER_S)
                    # The opening names the tree and the child, but nothing secret: the token is
                    # never sent, see decision 59.
                    proof = Proof(token, is_host=False)
                    _write(connected, {**proof.opening, **hello})
                    theirs = _read(connected)
                    _write(connected, proof.answer(theirs))
                    proof.check(theirs)
                    _read(connected)
                except BaseException:
                    connected.close()
                    raise
                return connected
        time.sleep(DIAL_NAP_S)
    return None


def greet(
    listener: socket.socket, token: bytes, title: str, own: int, expected: Collection[int]
) -> tuple[int, socket.socket]:
    """Accept one connection of a child. Return the child's number and the connection.

    Raises `OSError` if nobody connects, or a stranger does.
    """
    # The port is open to the network, so nothing is unpickled before `check` has proved that the
    # other end knows the token.
    connected, _ = listener.accept()
    try:
        connected.settimeout(GREET_S)
        proof = Proof(token, is_host=True)
        theirs = _read(connected)
        _write(connected, {**proof.opening, **proof.answer(theirs)})
        proof.check(_read(connected))
        child = int(theirs["from"])
        # A rank of the same job may dial for another tree, such as that of its stage.
        if theirs["tree"] != title or theirs["to"] != own or child not in expected:
            raise ConnectionRefusedError("a rank of another tree")
        _write(connected, {})
    except (ValueError, LookupError, TypeError) as error:
        connected.close()
        raise ConnectionRefusedError("not a rank of this job") from error
    except BaseException:
        connected.close()
        raise
    return child, connected


def _write(connected: socket.socket, document: dict[str, Any]) -> None:
    connected.sendall(json.dumps(document).encode() + b"\n")


def _read(connected: socket.socket) -> dict[str, Any]:
    """Return one line, read byte by byte, because messages follow it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = connected.recv(1)
        if not piece or len(line) > HELLO_BYTES_MAX:
            raise ConnectionResetError("closed during the handshake")
        line += piece
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError(f"{type(document).__name__}, expected an object")
    return document


FAN_OUT: Final = 16
TIMEOUT_S: Final = 1800.0
ACCEPT_S: Final = 0.2
LOOK_S: Final = 1.0
# Users of torch choose the network between nodes by this variable.
INTERFACES: Final = "GLOO_SOCKET_IFNAME"


class KeyStore(Protocol):
    """The part of torch's stores that ranks need to find each other. `get` waits for the key."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...


class RankTree:
    """The connections of one rank, which is number `index` of `size`.

    All ranks of a tree call the same methods in the same order. A method raises `AgreementError`
    on all ranks if one of them has ended, or has not come within `TIMEOUT_S` seconds. The tree
    cannot be used after that. Only one thread uses a tree.
    """

    def __init__(self, ranks: Sequence[int] = (0,), index: int = 0, token: bytes = b"") -> None:
        """Make the tree's end of this rank; `connect` connects it. `ranks` are for messages."""
        self.index, self.size = index, len(ranks)
        self._ranks, self._token = ranks, token
        first = index * FAN_OUT + 1
        self._children = list(range(first, min(first + FAN_OUT, self.size)))
        self._links: dict[int, NeighbourLink] = {}
        self._problem = ""
        self._splits = 0
        self._look: Callable[[float], object] | None = None
        _trees.add(self)

    @classmethod
    def over_store(cls, store: KeyStore, rank: int, size: int) -> RankTree:
        """Return the tree of all ranks. They find each other through `store`.

        Each rank sets one key and reads two.
        """
        if rank == 0:
            # The token is as safe as torch's store, through which the ranks met, see decision 59.
            store.set("token", secrets.token_hex(32))
        tree = cls(range(size), rank, bytes.fromhex(store.get("token").decode()))

        listener = listen(None, FAN_OUT) if tree._children else None
        # The listener must exist before its address is published: a child dials as soon as it reads
        # it.
        with listener or contextlib.nullcontext():
            if listener is not None:
                store.set(f"address {rank}", encode_address(listener))
            tree._join("all", listener, lambda parent: store.get(f"address {parent}").decode())
        return tree

    @classmethod
    def over_exchange(cls, exchange: Callable[[Any], list[Any]], rank: int, size: int) -> RankTree:
        """Return the tree of ranks that have a collective: `exchange` returns all ranks' values."""
        with listen(None, FAN_OUT) as listener:
            every = exchange((encode_address(listener), secrets.token_bytes(32)))
            tree = cls(range(size), rank, every[0][1])
            tree._join("exchanged", listener, lambda parent: every[parent][0])
        return tree

    def split(self, part: Hashable | None) -> RankTree | None:
        """Return a new tree of the ranks that pass an equal `part`, in this tree's order.

        All ranks of this tree call it. With None, a rank is in no new tree.
        """
        self._splits += 1
        # A single rank, or one that is in no new tree, needs no port.
        listener = listen(None, FAN_OUT) if part is not None and self.size > 1 else None
        with listener or contextlib.nullcontext():
            address = encode_address(listener) if listener is not None else ""
            # All ranks take part, those without a part too, because each passes on the values of
            # its children.
            every = self.gather_all((part, address))
            if part is None:
                return None
            members = [index for index, (other, _) in enumerate(every) if other == part]
            ranks = [self._ranks[member] for member in members]
            made = RankTree(ranks, members.index(self.index), self._token)
            made._join(f"{self._splits} {part}", listener, lambda parent: every[members[parent]][1])
        return made

    def close(self) -> None:
        """Leave the tree in an orderly way: nobody waits for this rank any more."""
        for link in self._links.values():
            link.leave()
        self._links.clear()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by index, on the first rank, and [] on others."""
        if self.index:
            self._collect(pickle.dumps(value, protocol=5))
            return []
        # The first rank's own value never travels, so it need not be pickled.
        return self._values(self._collect(b""), value)

    def gather_all(self, value: Any) -> list[Any]:
        """Return every rank's value, by index, on every rank."""
        found = self._collect(b"" if self.size == 1 else pickle.dumps(value, protocol=5))
        return self._values(self._spread(found), value)

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value on every rank. The values of others do not matter."""
        if self.size == 1:
            return value
        found = self._spread(pickle.dumps(value, protocol=5) if self.index == 0 else b"")
        return pickle.loads(found) if self.index else value

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return this rank's entry of the first rank's `values`, which are by index."""
        parts: dict[int, bytes] = {}
        if self.index:
            parts = dict(pickle.loads(self._receive(self._parent)))
        else:
            parts = {n: pickle.dumps(v, protocol=5) for n, v in enumerate(values) if n}
        below: dict[int, list[tuple[int, bytes]]] = {child: [] for child in self._children}
        for number, content in parts.items():
            if number != self.index:
                below[self._toward(number)].append((number, content))
        for child, its in below.items():
            self._send(child, pickle.dumps(its, protocol=5))
        return pickle.loads(parts[self.index]) if self.index else values[0]

    @contextlib.contextmanager
    def watched(self, look: Callable[[float], object]) -> Iterator[None]:
        """Call `look` about once a second with the seconds of each wait. It may raise."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks. Every rank passes the same count."""
        found = list(values)
        for child in self._children:
            its: list[int] = pickle.loads(self._receive(child))
            found = [max(pair) for pair in zip(found, its, strict=True)]
        if self.index:
            self._send(self._parent, pickle.dumps(found))
        agreed: list[int] = self.broadcast(found)
        return agreed

    # --- between neighbours -------------------------------------------------------------------

    @property
    def _parent(self) -> int:
        return (self.index - 1) // FAN_OUT

    def _toward(self, number: int) -> int:
        """Return the child of this rank that is above `number`, or that is `number`."""
        # The parent of n is (n - 1) // FAN_OUT, so walking up from the target finds this rank's
        # child.
        while (above := (number - 1) // FAN_OUT) != self.index:
            number = above
        return number

    def _collect(self, own: bytes) -> list[tuple[int, bytes]]:
        """Send the values of this rank and those below it up. Return all on the first rank."""
        found = [(self.index, own)]
        for child in self._children:
            found += pickle.loads(self._receive(child))
        if self.index:
            self._send(self._parent, pickle.dumps(found, protocol=5))
        return found

    def _spread(self, content: Any) -> Any:
        """Send the first rank's `content` down, and return it on every rank."""
        if self.index:
            content = self._receive(self._parent)
        elif self._children and not isinstance(content, bytes):
            content = pickle.dumps(content, protocol=5)
        for child in self._children:
            self._send(child, content)
        return content

    def _values(self, found: Any, own: Any) -> list[Any]:
        parts = pickle.loads(found) if isinstance(found, bytes) else found
        return [own if n == self.index else pickle.loads(content) for n, content in sorted(parts)]

    def _send(self, number: int, content: bytes) -> None:
        self._check()
        try:
            self._links[number].send(content)
        except TimeoutError:
            self._fail(f"{self._name(number)} did not take a message within {TIMEOUT_S:.0f} s")
        except OSError:
            self._fail(self._describe_end(number))

    def _receive(self, number: int) -> bytes:
        """Return the next message of a neighbour. Meanwhile hear whether another has ended."""
        self._check()
        awaited, limit_s = self._links[number], TIMEOUT_S
        if self.index and number == self._parent:
            # The rank that waits for the late one directly gives up first, and names it.
            limit_s *= 2
        give_up = time.monotonic() + limit_s
        while not awaited.messages:
            # All neighbours are polled, not only the awaited one: the end of any rank must reach
            # this one while it waits for another, see decision 59.
            by_handle = {link.handle: n for n, link in self._links.items() if not link.has_left}
            poll = select.poll()
            for handle in by_handle:
                poll.register(handle, select.POLLIN)
            left_s = give_up - time.monotonic()
            if awaited.has_left or left_s <= 0:
                why = "has left" if awaited.has_left else f"did not come within {limit_s:.0f} s"
                self._fail(f"{self._name(number)} {why}")
            if self._look is not None:
                self._look(limit_s - left_s)
                left_s = min(left_s, LOOK_S)
            for handle, _ in poll.poll(left_s * 1000):
                self._hear(by_handle[handle])
        return awaited.messages.popleft()

    def _hear(self, number: int) -> None:
        try:
            problem = self._links[number].hear()
        except OSError:
            problem = self._describe_end(number)
        if problem:
            self._fail(problem)

    def _describe_end(self, number: int) -> str:
        return f"{self._name(number)} has ended while others waited for it"

    def _name(self, number: int) -> str:
        return f"rank {self._ranks[number]}"

    def _check(self) -> None:
        if self._problem:
            raise AgreementError(self._problem)

    def _fail(self, problem: str) -> None:
        """Pass the problem on to all neighbours, and raise it."""
        advice = "; see that rank's log for its own error"
        self._problem = problem if problem.endswith(advice) else problem + advice
        # All neighbours hear it before this rank raises, so each rank of the tree reports the rank
        # that failed first.
        for link in self._links.values():
            link.fail(self._problem)
        self._links.clear()
        raise AgreementError(self._problem)

    # --- the start ----------------------------------------------------------------------------

    def _join(
        self, title: str, listener: socket.socket | None, look_up: Callable[[int], str]
    ) -> None:
        """Connect to the parent, then let the children connect. `title` is the tree's name."""
        # One limit for both directions. A parent that waits for its own parent cannot greet its
        # children yet, and they keep dialling.
        give_up = time.monotonic() + TIMEOUT_S
        if self.index:
            addresses, port = parse_address(look_up(self._parent))
            hello = {"tree": title, "from": self.index, "to": self._parent}
            found = dial(addresses, port, self._token, hello, give_up)
            if found is None:
                raise AgreementError(
                    f"rank {self._ranks[self.index]} cannot reach {self._name(self._parent)} at "
                    f"port {port} of {', '.join(addresses)}; expected an open connection between "
                    f"the nodes of the job. If they have several networks, set {INTERFACES}"
                )
            self._links[self._parent] = NeighbourLink(found, TIMEOUT_S)
        missing = set(self._children)
        while missing and listener is not None:
            if time.monotonic() > give_up:
                names = ", ".join(self._name(number) for number in sorted(missing))
                self._fail(f"{names} did not connect within {TIMEOUT_S:.0f} s")
            listener.settimeout(ACCEPT_S)
            # A stranger, or a rank that gave up, must not end the start. The next connection may be
            # right.
            with contextlib.suppress(OSError):
                child, connected = greet(listener, self._token, title, self.index, missing)
                missing.discard(child)
                self._links[child] = NeighbourLink(connected, TIMEOUT_S)


def encode_address(listener: socket.socket) -> str:
    """Return the addresses and the port by which other ranks reach `listener`, best first."""
    names = os.environ.get(INTERFACES, "").split(",")
    by_name = psutil.net_if_addrs() if any(names) else {}
    chosen = [
        one.address
        for name in names
        for one in by_name.get(name, ())
        if one.family in {socket.AF_INET, socket.AF_INET6}
    ]
    return json.dumps(([*chosen, *own_addresses()], listener.getsockname()[1]))


def parse_address(text: str) -> tuple[list[str], int]:
    """Return the addresses and the port of `encode_address`."""
    addresses, port = json.loads(text)
    return list(addresses), int(port)


_trees: Final[weakref.WeakSet[RankTree]] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked child's copies. With them open, nobody would see that the rank has ended."""
    # The descriptors are closed without a word: the rank itself still uses the connections, and a
    # farewell from the child would end them.
    for tree in list(_trees):
        for link in tree._links.values():
            link.close()


os.register_at_fork(after_in_child=_close_in_child)
