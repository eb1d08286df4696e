"""Connections with unfinished requests: the server closes them, and other clients still connect."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.api.conftest import Served, serving, wait_for
from tests.support.runs import RunFolder

from holdfast.api.connections import limited_protocol, raise_open_files

MOST = 40
REQUEST_S = 2.0
PARTS = (
    b"",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"POST /api/v1/session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 60000\r\n\r\n{",
)


@pytest.fixture(scope="module")
def limited(home: Path, sample_runs: dict[str, RunFolder]) -> Iterator[Served]:
    """A server with a small connection limit and a request time limit of two seconds."""
    protocol = limited_protocol(MOST, request_s=REQUEST_S, stall_s=REQUEST_S)
    with serving(home, sample_runs, http=protocol) as one:
        yield one


def connect(stack: contextlib.ExitStack, served: Served, first: bytes) -> socket.socket:
    address = httpx.URL(served.url)
    assert address.port is not None
    opened = stack.enter_context(socket.create_connection((address.host, address.port), 30))
    opened.sendall(first)
    return opened


def is_closed(opened: socket.socket) -> bool:
    """True once the server has closed the connection; its response is ignored."""
    opened.setblocking(False)
    try:
        return opened.recv(65536) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.more
@pytest.mark.parametrize("first", PARTS)
def test_unfinished_requests_are_closed_after_the_time_limit(limited: Served, first: bytes) -> None:
    with contextlib.ExitStack() as stack:
        opened = connect(stack, limited, first)
        began = time.monotonic()
        wait_for(lambda: is_closed(opened), 30)
        assert time.monotonic() - began > REQUEST_S / 2


def test_slowly_sent_request_is_closed_after_the_time_limit(limited: Served) -> None:
    with contextlib.ExitStack() as stack:
        opened = connect(stack, limited, b"GET /healthz HTTP/1.1\r\n")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while not is_closed(opened) and time.monotonic() - began < 30:
                opened.setblocking(True)
                opened.sendall(b"X-More: yes\r\n")
                time.sleep(0.1)
        assert time.monotonic() - began < 15


def test_unfinished_requests_do_not_block_other_clients(limited: Served) -> None:
    with contextlib.ExitStack() as stack, limited.client() as client:
        for number in range(3 * MOST):
            connect(stack, limited, PARTS[number % len(PARTS)])
            if number % 20 == 0:
                assert client.get("/api/v1/runs").status_code == 200
        began = time.monotonic()
        with limited.client() as fresh:
            assert fresh.get("/api/v1/runs").status_code == 200
        assert time.monotonic() - began < REQUEST_S


def test_event_stream_outlives_the_request_time_limit(limited: Served) -> None:
    with limited.client() as client, client.stream("GET", "/api/v1/events") as stream:
        told = stream.iter_raw()
        next(told)
        time.sleep(1.5 * REQUEST_S)
        limited.services.watch.touch(limited.runs["gpt"].paths)
        with limited.client() as other:
            path = "/api/v1/checkpoints/gpt:step-00000200.a0003.l01/pin"
            assert other.post(path, json={}).status_code == 200
        assert next(told)


def test_open_file_limit_is_raised_and_exceeds_the_connection_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        most = raise_open_files()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert soft > 512 or before[1] == 512
        assert 0 < most < soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
