"""A webhook receiver and an SMTP server on loopback, which keep what they get."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook(ThreadingHTTPServer):
    """Keeps JSON messages; `failing` answers with an error that many times first."""

    def __init__(self, failing: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Hook)
        self.got: list[dict[str, Any]] = []
        self.failing = failing

    @property
    def address(self) -> str:
        return f"json://127.0.0.1:{self.server_port}/hooks/token-of-the-receiver"


class _Hook(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        is_failing = self.server.failing > 0
        self.server.failing -= is_failing
        if not is_failing:
            self.server.got.append(json.loads(content))
        self.send_response(503 if is_failing else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be silent."""


class MailServer(socketserver.ThreadingTCPServer):
    """Keeps the texts of messages."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Mail)
        self.got: list[str] = []

    @property
    def address(self) -> str:
        port = self.server_address[1]
        return f"mailto://127.0.0.1:{port}?from=runs@lab.example&to=ann@lab.example&smtp=127.0.0.1"


class _Mail(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        self._say("220 lab.example")
        while line := self.rfile.readline():
            word = line.strip().upper()
            if word == b"DATA":
                self._say("354 go on")
                text = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.got.append(text.decode())
            self._say("221 bye" if word == b"QUIT" else "250 ok")
            if word == b"QUIT":
                return

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@contextmanager
def receiving(*servers: socketserver.BaseServer) -> Iterator[None]:
    """Serve in threads until the block ends."""
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
