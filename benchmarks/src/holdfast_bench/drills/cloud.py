"""A cloud's metadata service on loopback, to announce a preemption to an agent.

It behaves like Google's service: a request may wait until the value changes.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

CLOUD: Final = "gcp"
QUIET: Final = {"preempted": "FALSE", "maintenance-event": "NONE"}
WAIT_S_MAX: Final = 60.0
FLAVOR: Final = "Metadata-Flavor"
END_S: Final = 10.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: an agent that ends closes its connections."""


class CloudService:
    """Serves from construction until `close`. `preempt` announces a preemption."""

    def __init__(self) -> None:
        self._values = dict(QUIET)
        self._changed = threading.Condition()
        self._is_over = False
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The value for `supervision.notices_url`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def preempt(self) -> None:
        """Announce that the machine will be taken away."""
        self._set("preempted", "TRUE")

    def calm(self) -> None:
        """Withdraw the announcement, for the next machine."""
        self._set("preempted", "FALSE")

    def close(self) -> None:
        """Stop the service and every waiting request."""
        self._is_over = True
        self._set("preempted", "FALSE")
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(END_S)

    def _set(self, entry: str, value: str) -> None:
        with self._changed:
            self._values[entry] = value
            self._changed.notify_all()

    def _wait(self, entry: str, known: str | None, wait_s: float) -> str:
        """Return the value when it differs from `known`, or after `wait_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._values[entry] != known, wait_s)
            return self._values[entry]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(parts.query).items()}
                entry = parts.path.rpartition("/")[2]
                if entry not in QUIET or self.headers.get(FLAVOR) != "Google":
                    self.send_error(404)
                    return
                waits = query.get("wait_for_change") == "true"
                wait_s = float(query.get("timeout_sec", WAIT_S_MAX)) if waits else 0.0
                # The value is also its ETag.
                value = service._wait(entry, query.get("last_etag"), min(wait_s, WAIT_S_MAX))
                self.send_response(200)
                for name, text in {FLAVOR: "Google", "ETag": value}.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(value)))
                self.end_headers()
                self.wfile.write(value.encode())

            def log_message(self, *_: Any) -> None:
                """Do not log requests, because they are frequent."""

        return Handler
