"""`holdfast trace RUN`: send a run as one OpenTelemetry trace to a collector."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from holdfast.cli.shared.arguments import RunArgument
from holdfast.cli.shared.index import locate_run, secrets_in
from holdfast.cli.shared.output import AsJson, RootOption, answer, say
from holdfast.contracts.errors import SpecError, reading_run
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.history import load_events, load_history

# OpenTelemetry's own names.
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def trace(run: RunArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Send a run as one OpenTelemetry trace: its attempts, launches, loads and saves.

    The collector is that of $OTEL_EXPORTER_OTLP_ENDPOINT, by OTLP over HTTP. Repeat the command as
    often as you want: a span has the same id each time.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        raise SpecError(
            f"no collector: set {ENDPOINTS[1]}, such as http://127.0.0.1:4318, to the address of "
            "one that takes OTLP over HTTP"
        )
    try:
        from holdfast.cli.support.otlp import send
    except ImportError as error:
        raise SpecError(
            f"`holdfast trace` needs OpenTelemetry: {error}; install Holdfast with the extra `otlp`"
        ) from error
    from holdfast.cli.support.spans import redacted, spans_of, trace_id

    paths = locate_run(run, root)
    with reading_run(paths.directory):
        events = load_events(paths)
        history = load_history(paths, events)
        secrets = secrets_in(paths)
        found = [redacted(one, secrets) for one in spans_of(history, events, now=time.time())]
    uid = history.record.uid
    send(found, uid, paths.name)
    facts: dict[str, Any] = {
        "run": paths.name,
        "trace_id": f"{trace_id(uid):032x}",
        "spans": len(found),
    }
    answer(
        facts,
        as_json,
        lambda data: say(f"sent {counted(data['spans'], 'span')} of trace {data['trace_id']}"),
    )
