"""`holdfast trace`: a run as one trace, as a collector on loopback receives it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.support.cli_calls import Call
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.states import AttemptState, Cause

SECRET = "hf_AbCdEfGhIjKlMnOpQrSt"


class Collector(ThreadingHTTPServer):
    """Keeps the requests of OTLP over HTTP; it refuses them with `status`."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.answer = b""
        self.got: list[ExportTraceServiceRequest] = []

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.got
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status == 200:
            assert self.path == "/v1/traces"
            self.server.got.append(ExportTraceServiceRequest.FromString(content))
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/login")
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    with Collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def run(root: Path) -> RunFolder:
    """A run with a crash after one commit, and a second attempt that loaded and failed to save."""
    made = RunFolder(root, "gpt", "a" * 32)
    first = made.submit(1, 2, T0)
    made.launch(1, 1, 0, None)
    with JournalWriter(first.rank_journal) as journal:
        saved = "step-00000010.a0001.l01"
        about: dict[str, Any] = {"attempt": 1, "launch": 1, "checkpoint": saved, "step": 10}
        journal.append(EventKind.STAGED, **about, bytes=20, blocked_s=0.5)
    made.commit(10, 1)
    made.finish(1, AttemptState.FAILED, Cause.INFRASTRUCTURE, 12, T0 + 100)
    second = made.submit(2, 2, T0 + 110)
    made.launch(2, 1, 10, saved)
    with JournalWriter(second.rank_journal) as journal:
        about = {"attempt": 2, "launch": 1, "checkpoint": "step-00000020.a0002.l01", "step": 20}
        journal.append(EventKind.STAGED, **about, blocked_s=0.1)
        journal.append(EventKind.SAVE_FAILED, **about, error=f"disk full, token {SECRET}")
    return made


def test_a_run_is_one_trace(call: Call, run: RunFolder, collector: Collector) -> None:
    done = call("trace", "gpt", "--json")
    assert done.status == 0, done.err
    spans = collector.spans()
    assert done.json["spans"] == len(spans)
    assert {one.trace_id.hex() for one in spans} == {done.json["trace_id"]}
    names = {one.span_id: one.name for one in spans}
    assert len(names) == len(spans)
    tree = sorted((names.get(one.parent_span_id, ""), one.name) for one in spans)
    assert tree == [
        ("", "run gpt"),
        ("attempt 1", "launch 1"),
        ("attempt 2", "launch 1"),
        ("launch 1", "load"),
        ("launch 1", "save"),
        ("launch 1", "save"),
        ("run gpt", "attempt 1"),
        ("run gpt", "attempt 2"),
    ]
    assert all(one.end_time_unix_nano >= one.start_time_unix_nano for one in spans)
    failed = [one for one in spans if one.status.code == 2]
    assert sorted(one.name for one in failed) == ["attempt 1", "save"]
    assert not any(SECRET in str(one) for one in spans)
    ids = set(names)
    assert call("trace", "gpt").status == 0
    assert {one.span_id for one in collector.spans()} == ids


def test_a_missing_or_refusing_collector_is_reported(
    call: Call, run: RunFolder, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.status = 400
    refused = call("trace", "gpt")
    assert refused.status == 4
    assert "took 0 of" in refused.err
    assert call("trace", "nobody").status == 3
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    missing = call("trace", "gpt")
    assert missing.status == 2
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in missing.err


def test_a_redirection_and_rejected_spans_are_no_success(
    call: Call, run: RunFolder, collector: Collector
) -> None:
    """The exporter counts both as sent: a login page in front of a collector takes nothing."""
    collector.status = 302
    moved = call("trace", "gpt")
    assert moved.status == 4, moved.out
    collector.status = 200
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = 3
    answer.partial_success.error_message = "too old"
    collector.answer = answer.SerializeToString()
    rejected = call("trace", "gpt")
    assert rejected.status == 4
    assert "rejected 3 spans: too old" in rejected.err
    collector.answer = b"<html>sign in</html>"
    assert call("trace", "gpt").status == 4
