"""Sends spans to a collector by OTLP over HTTP. Only this module imports OpenTelemetry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from holdfast.cli.support.spans import RunSpan, span_id, trace_id
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.version import holdfast_version

BATCH: Final = 500
NANOSECONDS: Final = 1_000_000_000


def send(spans: Sequence[RunSpan], uid: str, run: str) -> None:
    """Send the spans of a run in batches. Raises `ServiceError` if the collector refuses one.

    The collector, its headers and the time limit are those of the `OTEL_EXPORTER_OTLP_` variables.
    """
    resource = Resource.create(
        {"service.name": "holdfast", "holdfast.run": run, "holdfast.run_uid": uid}
    )
    # It buffers nothing, and the process ends after this.
    exporter = OTLPSpanExporter()
    for start in range(0, len(spans), BATCH):
        batch = [_readable(one, uid, resource) for one in spans[start : start + BATCH]]
        if exporter.export(batch) is not SpanExportResult.SUCCESS:
            raise ServiceError(
                f"the collector took {start} of {len(spans)} spans; check "
                "OTEL_EXPORTER_OTLP_ENDPOINT, and repeat: a span has the same id each time"
            )


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
