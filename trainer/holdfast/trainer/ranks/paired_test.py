"""A short test of all nodes and of the links between them, at a step boundary.

All ranks take part at once, after an agreement like that of a stop. Each rank does fixed pieces of
work on its processor and its device. Then the nodes exchange data in pairs, over connections of
their own: a program's process group may have operations in flight, and a failed test must not break
it. The pairs are a ring, so each node has two. Nothing of it draws random numbers.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import torch

from holdfast.contracts.node.handshake import listen
from holdfast.contracts.node.reporting import report
from holdfast.trainer.process import devices
from holdfast.trainer.ranks.rank_tree import RankTree, dial, encode_address, greet, parse_address

# The pieces of work are repeated for this long, and the mean counts. The least time would hide
# another process that takes turns with the rank.
WORK_S: Final = 0.15
LOOPS: Final = 20_000
# Rows and columns of the matrices, without and with an accelerator, and products per piece.
HOST_MATRIX, DEVICE_MATRIX, PRODUCTS = 256, 2048, 20
# The exchanges of all rounds end after this, whatever is missing.
LINKS_S: Final = 1.5
PAIR_S: Final = 0.2
EXCHANGES_MAX: Final = 64
CHUNK: Final = 1 << 20
_MORE, _END = b"M", b"E"
_TITLE: Final = "paired test"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results by node. `pair_rates` are between each node and the next one, in MB/s.

    With two nodes there is one pair. A rate is 0.0 if the nodes did not connect in time. If no
    exchange ended in time, it is the rate that an exchange would have needed.
    """

    host_times: list[float] = field(default_factory=list)
    device_times: list[float] = field(default_factory=list)
    pair_rates: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, list[float]]:
        """Return the facts of a journal line."""
        return {name: [round(one, 6) for one in values] for name, values in vars(self).items()}


def measure(
    tree: RankTree, *, node: int, nodes: int, is_first: bool, device: torch.device
) -> Measured | None:
    """Measure with all ranks of `tree`, and return the results on the first one.

    The first rank of each node, `is_first`, measures its links too.
    """
    host_s, device_s = _host_work_s(), _device_work_s(device)
    listener = listen(None, 1) if is_first and nodes > 1 else None
    with listener or contextlib.nullcontext():
        address = encode_address(listener) if listener is not None else ""
        token = secrets.token_bytes(32)
        every = tree.gather_all((node, address, token))
        at = {place: (where, secret) for place, where, secret in every if where}
        rate = 0.0
        if listener is not None:
            rate = _Links(listener, node, nodes, at).measure()
    found = tree.gather((node, host_s, device_s, rate))
    return _merge(found, nodes) if found else None


def pairs_of(nodes: int) -> list[tuple[int, int]]:
    """Return the pairs of nodes that exchange data, by the number of the pair."""
    return [(one, (one + 1) % nodes) for one in range(nodes if nodes > 2 else nodes - 1)]


def rounds_of(nodes: int) -> list[list[int]]:
    """Return the numbers of the pairs of each round, so that no node is in two pairs of it."""
    count = len(pairs_of(nodes))
    last = count - 1 if count > 1 and count % 2 else None
    rounds = [[n for n in range(count) if n % 2 == odd and n != last] for odd in (0, 1)]
    return [each for each in (*rounds, [last] if last is not None else []) if each]


def _merge(found: list[tuple[int, float, float, float]], nodes: int) -> Measured:
    by_node = [[one for one in found if one[0] == node] for node in range(nodes)]
    return Measured(
        host_times=[max((one[1] for one in its), default=0.0) for its in by_node],
        device_times=[max((one[2] for one in its), default=0.0) for its in by_node],
        pair_rates=[max(one[3] for one in by_node[pair]) for pair, _ in pairs_of(nodes)],
    )


def _host_work_s() -> float:
    """Return the mean seconds of a loop of Python."""
    began, times = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - began) < WORK_S:
        total = 0
        for number in range(LOOPS):
            total += number
        times += 1
    return spent_s / times


def _device_work_s(device: torch.device) -> float:
    """Return the mean seconds of some matrix products, or 0.0 if there is no memory for them."""
    is_streamed = devices.is_streamed(device)
    size = DEVICE_MATRIX if is_streamed else HOST_MATRIX
    kind = torch.float16 if is_streamed else torch.float32
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            ones = torch.ones(size, size, dtype=kind, device=device)
            out = torch.empty_like(ones)
            # Not timed: what the first product loads, and what the step has left on the device.
            torch.mm(ones, ones, out=out)
            _complete(device)
            began, times = time.perf_counter(), 0
            while (spent_s := time.perf_counter() - began) < WORK_S:
                for _ in range(PRODUCTS):
                    torch.mm(ones, ones, out=out)
                _complete(device)
                times += 1
    # Too little memory, or a device without such a product. The other measurements count alone.
    except RuntimeError as error:
        report(f"holdfast: the paired test has no time of {device}: {error}", is_error=True)
        return 0.0
    return spent_s / times


def _complete(device: torch.device) -> None:
    devices.synchronize([device] if devices.is_streamed(device) else [])


class _Links:
    """One node's exchanges with the next node and with the one before, each in a thread.

    A thread that is late is left to itself, so neither training nor the next round waits for a dead
    link.
    """

    def __init__(
        self,
        listener: socket.socket,
        node: int,
        nodes: int,
        at: dict[int, tuple[str, bytes]],
    ) -> None:
        self._listener, self._node, self._nodes, self._at = listener, node, nodes, at
        self._until = 0.0
        # Of the exchanges with the next node: their seconds, and when the first one began.
        self._taken: list[float] = []
        self._began: float | None = None

    def measure(self) -> float:
        """Return the rate to the next node in MB/s, or 0.0."""
        pairs, rounds, began = pairs_of(self._nodes), rounds_of(self._nodes), time.monotonic()
        rate = 0.0
        for done, numbers in enumerate(rounds, start=1):
            self._until = began + LINKS_S * done / len(rounds)
            for pair in (pairs[number] for number in numbers if self._node in pairs[number]):
                thread = threading.Thread(target=self._exchange, args=pair, daemon=True)
                thread.start()
                thread.join(self._until - time.monotonic())
                if pair[0] == self._node:
                    rate = self._rate()
        return rate

    def _rate(self) -> float:
        # The first exchange opens the window of TCP.
        taken = self._taken[1:] or self._taken[:]
        if not taken and self._began is not None:
            taken = [time.perf_counter() - self._began]
        return 2 * CHUNK / median(taken) / 1e6 if taken else 0.0

    def _exchange(self, one: int, other: int) -> None:
        # A node that is gone, or a link that is too slow: this pair has no rate.
        with contextlib.suppress(OSError, KeyError):
            if one == self._node:
                self._lead(other)
            else:
                self._follow(one)

    @contextlib.contextmanager
    def _until_late(self, connected: socket.socket) -> Iterator[socket.socket]:
        with connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.settimeout(max(0.01, self._until - time.monotonic()))
            yield connected

    def _lead(self, other: int) -> None:
        """Exchange data with the next node."""
        address, token = self._at[other]
        addresses, port = parse_address(address)
        hello = {"tree": _TITLE, "from": self._node, "to": other}
        found = dial(addresses, port, token, hello, self._until)
        if found is None:
            return
        content, taken = bytes(CHUNK), self._taken
        with self._until_late(found) as connected:
            self._began = began = time.perf_counter()
            while time.perf_counter() < began + PAIR_S and len(taken) < EXCHANGES_MAX:
                at = time.perf_counter()
                connected.sendall(_MORE)
                connected.sendall(content)
                _receive(connected, CHUNK)
                taken.append(time.perf_counter() - at)
            connected.sendall(_END)

    def _follow(self, other: int) -> None:
        """Send back what the node before sends."""
        self._listener.settimeout(max(0.01, self._until - time.monotonic()))
        token = self._at[self._node][1]
        _, found = greet(self._listener, token, _TITLE, self._node, {other})
        content = bytes(CHUNK)
        with self._until_late(found) as connected:
            while _receive(connected, 1) == _MORE:
                _receive(connected, CHUNK)
                connected.sendall(content)


def _receive(connected: socket.socket, size: int) -> bytes:
    """Return `size` bytes. Raises `OSError` if they do not come."""
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = connected.recv_into(view[done:])
        if not count:
            raise ConnectionResetError("closed")
        done += count
    return bytes(content[:1])
