"""The Prometheus metrics, read from a scrape of a server with one live run."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from holdfast.api import prometheus
from holdfast.api.services import Measures
from holdfast_docs.markdown import code, sentence, table

# A live run that has a value for each metric. Only names, types, help and labels are shown.
_RUN: Final = {
    **dict.fromkeys(("step", "world_size", "attempts"), 1),
    "run": "gpt",
    "uid": "0",
    "state": "running",
    "committed_at": "2026-01-01T00:00:00+00:00",
}


@dataclass(frozen=True)
class Family:
    """One metric, with the names of all samples of it."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]


def families() -> list[Family]:
    """All metrics of `/metrics`, in the order of a scrape."""
    found = []
    for one in text_string_to_metric_families(prometheus.render(_services()).decode()):
        labels = dict.fromkeys(label for sample in one.samples for label in sample.labels)
        # Every histogram has a label for its buckets.
        shown = tuple(label for label in labels if label != "le")
        if not one.name.endswith("_created"):
            found.append(Family(one.name, one.type, one.documentation, shown))
    return found


def render() -> str:
    """A table of all metrics."""
    rows = [
        (code(one.name), one.kind, ", ".join(map(code, one.labels)) or "none", sentence(one.help))
        for one in families()
    ]
    return table(("metric", "type", "labels", "meaning"), rows)


def _services() -> Any:
    measures = Measures()
    measures.answered("GET", 200, 0.0)
    run = {**_RUN, "goodput": SimpleNamespace(get=lambda _name: 1.0)}
    return SimpleNamespace(
        measures=measures,
        watch=SimpleNamespace(
            lag_s=lambda: 0.0, round_s=0.0, unreadable_count=lambda: 0, pace=lambda _uid: None
        ),
        hub=SimpleNamespace(readers=0),
        store=SimpleNamespace(count_runs=dict, live_runs=lambda: [run]),
    )
