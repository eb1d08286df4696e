"""A TCP proxy that can stop forwarding: its kernel accepts and acknowledges, and nobody answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Final

CHUNK_BYTES: Final = 65536


class StallingProxy:
    """Forwards connections to `port` on loopback. While it is stalled, nothing passes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flowing = threading.Event()
        self._flowing.set()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._open: list[socket.socket] = [self._listening]
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Stop forwarding, in old and in new connections."""
        self._flowing.clear()

    def flow(self) -> None:
        """Forward again, also what was sent meanwhile."""
        self._flowing.set()

    def close(self) -> None:
        """Close all connections."""
        self._flowing.set()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        # The loop ends when `close` closes the socket.
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._flowing.wait()
        with contextlib.suppress(OSError):
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open.append(server)
            back = threading.Thread(target=self._forward, args=(server, client), daemon=True)
            back.start()
            self._forward(client, server)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        # A connection that either side has closed ends the other half too.
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self._flowing.wait()
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def stalling_proxy(port: int) -> Iterator[StallingProxy]:
    """A proxy before `port`, closed at the end."""
    proxy = StallingProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
