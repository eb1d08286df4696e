"""What the command asks of Prefect's API, and how it handles the answers."""

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
    """A healthy API without the deployment, which first answers that it is busy."""

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
        # Prefect's client waits this long before it retries.
        self.send_header("Retry-After", "0.1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing to the test output."""


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


def test_a_request_to_a_briefly_busy_api_is_retried(busy: str) -> None:
    with (
        temporary_settings({PREFECT_API_URL: busy}),
        pytest.raises(ServiceError, match="has no deployment train/holdfast"),
    ):
        check_service()
    assert len(BusyApi.asked) == BUSY_TIMES + 1


@pytest.mark.more
def test_an_api_that_is_away_is_named(busy: str) -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(
            ServiceError,
            match=r":9/api does not answer \(.*\)\. Start it with `prefect server start`",
        ),
    ):
        check_service()
    with (
        temporary_settings({PREFECT_API_URL: busy}),
        pytest.raises(ServiceError, match="Prefect has no deployment"),
    ):
        check_service()
