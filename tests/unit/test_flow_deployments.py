"""What the command says to Prefect's API, and what it makes of its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from holdfast.contracts.errors import ServiceError
from holdfast.flows.deployments import check_service

BUSY_TIMES = 1


class BusyApi(BaseHTTPRequestHandler):
    """Healthy, without a deployment, and too busy to say so at once."""

    asked: list[str]

    def do_GET(self) -> None:
        is_health = self.path.endswith("/health")
        if not is_health:
            self.asked.append(self.path)
        status = 200 if is_health else 503 if len(self.asked) <= BUSY_TIMES else 404
        body = b"true" if is_health else b'{"exception_message": "Service Unavailable"}'
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        # Prefect's client waits for so long before it asks again.
        self.send_header("Retry-After", "0.1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing of it goes to the tests' output."""


@pytest.fixture
def busy() -> Iterator[str]:
    BusyApi.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), BusyApi) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/api"
        finally:
            server.shutdown()
            thread.join(30)


def test_an_api_that_is_busy_for_a_moment_is_asked_again(busy: str) -> None:
    with (
        temporary_settings({PREFECT_API_URL: busy}),
        pytest.raises(ServiceError, match="has no deployment train/holdfast"),
    ):
        check_service()
    assert len(BusyApi.asked) == BUSY_TIMES + 1
