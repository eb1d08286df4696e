"""A Prefect server that accepts requests and does not answer: its callers get an error in time."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from holdfast.contracts.errors import ServiceError
from holdfast.flows.deployments import flow_run_state
from holdfast.flows.supervisor.cancellation import find_cancelling

ANSWER_S_MAX: Final = 15.0


class Hanging(BaseHTTPRequestHandler):
    """Answers a health check only, as a server whose database hangs."""

    released = threading.Event()

    def do_GET(self) -> None:
        if not self.path.endswith(("/health", "/version")):
            self.released.wait(120)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hanging() -> Iterator[str]:
    Hanging.released.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hanging)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/api"
    with temporary_settings({PREFECT_API_URL: url}):
        yield url
    Hanging.released.set()
    server.shutdown()
    server.server_close()


@pytest.mark.more
def test_a_request_ends_in_time(hanging: str) -> None:
    began = time.monotonic()
    with pytest.raises(ServiceError, match="did not answer for"):
        flow_run_state(str(uuid.uuid4()))
    assert time.monotonic() - began < ANSWER_S_MAX


@pytest.mark.more
def test_the_question_of_a_process_that_is_being_killed_ends_in_time(hanging: str) -> None:
    began = time.monotonic()
    assert not find_cancelling(str(uuid.uuid4()))
    assert time.monotonic() - began < ANSWER_S_MAX, "Prefect kills the process after 30 s"
