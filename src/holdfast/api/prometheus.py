"""Figures for Prometheus: of the runs, made at each scrape from the index, and of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from holdfast.api.services import Services
from holdfast.contracts.states import RunState

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


def render(services: Services) -> bytes:
    """All figures in Prometheus' text format. Raises `LineageError` when the index is away."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures([*_server(services), *_runs(services)]))
    return generate_latest(registry)


class _Figures:
    """Figures that were computed for this scrape."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _server(services: Services) -> Iterable[Metric]:
    watch = services.watch
    yield _gauge("ingest_lag_seconds", "since all live runs were in the index", watch.lag_s())
    yield _gauge("ingest_round_seconds", "duration of the last look at the runs", watch.round_s)
    yield _gauge("ingest_problems", "roots and runs that cannot be read", len(watch.problems))
    yield _gauge("event_streams", "open streams of news", services.hub.readers)


def _runs(services: Services) -> Iterable[Metric]:
    counts = Counter({str(state): 0 for state in RunState})
    counts.update(services.store.count_runs())
    by_state = GaugeMetricFamily("holdfast_runs", "runs by state", labels=["state"])
    for state, count in sorted(counts.items()):
        by_state.add_metric([state], count)
    yield by_state
    live: list[Mapping[str, Any]] = list(services.store.live_runs())
    facts = (
        ("run_step", "last step that any rank finished", "step"),
        ("run_gpus", "GPUs of the newest attempt", "world_size"),
        ("run_attempts", "attempts so far", "attempts"),
    )
    for name, words, key in facts:
        family = GaugeMetricFamily(f"holdfast_{name}", words, labels=["run", "uid"])
        for row in live:
            if row.get(key) is not None:
                family.add_metric([row["run"], row["uid"]], float(row[key]))
        yield family


def _gauge(name: str, words: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"holdfast_{name}", words)
    if value is not None:
        family.add_metric([], value)
    return family
