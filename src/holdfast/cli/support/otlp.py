"""Sends spans to a collector by OTLP over HTTP. Only this module imports OpenTelemetry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from holdfast.cli.support.spans import RunSpan, span_id, trace_id
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.plain_text import counted, plain_line
from holdfast.contracts.version import holdfast_version

BATCH: Final = 500
SAID_CHARACTERS: Final = 300
NANOSECONDS: Final = 1_000_000_000


def send(spans: Sequence[RunSpan], uid: str, run: str) -> None:
    """Send the spans of a run in batches. Raises `ServiceError` if the collector refuses some.

    The collector, its headers and the time limit are those of the `OTEL_EXPORTER_OTLP_` variables.
    """
    resource = Resource.create(
        {"service.name": "holdfast", "holdfast.run": run, "holdfast.run_uid": uid}
    )
    # It buffers nothing, and the process ends after this.
    answers = _Answers()
    session = requests.Session()
    session.hooks["response"].append(answers.take)
    exporter = OTLPSpanExporter(session=session)
    for start in range(0, len(spans), BATCH):
        batch = [_readable(one, uid, resource) for one in spans[start : start + BATCH]]
        if exporter.export(batch) is not SpanExportResult.SUCCESS:
            raise ServiceError(
                f"the collector took {start} of {len(spans)} spans; check "
                "OTEL_EXPORTER_OTLP_ENDPOINT, and repeat: a span has the same id each time"
            )
        if problem := answers.problem():
            raise ServiceError(f"{problem}; check OTEL_EXPORTER_OTLP_ENDPOINT, and repeat")


class _Answers:
    """The newest answer. To the exporter, a redirection and a partial success are successes."""

    def __init__(self) -> None:
        self._status, self._content = 200, b""

    def take(self, response: requests.Response, **_: Any) -> None:
        self._status, self._content = response.status_code, response.content

    def problem(self) -> str:
        """Return why spans were not taken, or ''."""
        if not 200 <= self._status < 300:
            return f"the collector answered with status {self._status}, expected 200"
        try:
            rejected = ExportTraceServiceResponse.FromString(self._content).partial_success
        except DecodeError:
            return "the answer is not that of a collector of OTLP over HTTP"
        if not rejected.rejected_spans:
            return ""
        said = plain_line(rejected.error_message)[:SAID_CHARACTERS]
        count = counted(rejected.rejected_spans, "span")
        return f"the collector rejected {count}: {said or 'it gave no reason'}"


def _readable(span: RunSpan, uid: str, resource: Resource) -> ReadableSpan:
    def context(key: str) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_id(uid), span_id(uid, key), is_remote=False, trace_flags=flags)

    status = Status(StatusCode.ERROR, span.problem) if span.problem else Status(StatusCode.UNSET)
    return ReadableSpan(
        name=span.name,
        context=context(span.key),
        parent=context(span.parent) if span.parent else None,
        resource=resource,
        attributes=span.attributes,
        status=status,
        start_time=int(span.started_at * NANOSECONDS),
        end_time=int(span.ended_at * NANOSECONDS),
        instrumentation_scope=InstrumentationScope("holdfast", holdfast_version()),
    )
