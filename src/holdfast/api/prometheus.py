"""Figures for Prometheus: of the runs, made at each scrape from the index, and of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from holdfast.api.services import Services
from holdfast.contracts.states import RunState

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
Row = Mapping[str, Any]

# Of each live run: name, words, and how the figure is read from its row.
_RUN_FIGURES: Final[tuple[tuple[str, str, Callable[[Row], float | None]], ...]] = (
    ("run_step", "last step that any rank finished", lambda row: row["step"]),
    ("run_gpus", "GPUs of the newest attempt", lambda row: row["world_size"]),
    ("run_attempts", "attempts so far", lambda row: row["attempts"]),
    (
        "run_committed_timestamp_seconds",
        "when the newest checkpoint was committed",
        lambda row: _unix_time(row["committed_at"]),
    ),
    ("run_ettr", "effective training time ratio", lambda row: row["goodput"].get("ettr")),
    ("run_steps_lost", "steps trained again", lambda row: row["goodput"].get("steps_lost")),
    ("run_gpu_hours", "GPU hours held", lambda row: row["goodput"].get("gpu_hours")),
    (
        "run_preemption_gpu_hours",
        "GPU hours that preemptions cost",
        lambda row: row["goodput"].get("preemption_gpu_hours"),
    ),
    ("run_cost", "cost so far, in the run's currency", lambda row: row["goodput"].get("cost")),
)


def render(services: Services) -> bytes:
    """All figures in Prometheus' text format. Raises `LineageError` when the index is away."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures([*_server(services), *_runs(services)]))
    return generate_latest(registry) + generate_latest(services.measures.registry)


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
    live = services.store.live_runs()
    for name, words, read in _RUN_FIGURES:
        family = GaugeMetricFamily(f"holdfast_{name}", f"{words}; live runs", labels=["run", "uid"])
        for row in live:
            value = read(row)
            if value is not None:
                family.add_metric([row["run"], row["uid"]], float(value))
        yield family


def _gauge(name: str, words: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"holdfast_{name}", words)
    if value is not None:
        family.add_metric([], value)
    return family


def _unix_time(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment).timestamp() if moment else None
