"""Prometheus metrics of the runs, read from the index at each scrape, and of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from holdfast.api.problems import LOG
from holdfast.api.services import Services
from holdfast.contracts.errors import LineageError
from holdfast.contracts.plain_text import unix_time
from holdfast.contracts.states import RunState

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
Row = Mapping[str, Any]

# The metrics of each live run: (name, help text, function that reads the value from its row).
# `trained` is its last step by its heartbeats, if the server has seen one.
_RUN_METRICS: Final[tuple[tuple[str, str, Callable[[Row], float | None]], ...]] = (
    (
        "run_step",
        "last step that any rank finished, 0 before the first",
        lambda row: row["trained"] if row["trained"] is not None else row["step"] or 0,
    ),
    ("run_committed_step", "step of the newest checkpoint", lambda row: row["step"]),
    (
        "run_running",
        "1 while an attempt runs, 0 while the run waits or is paused",
        lambda row: row["state"] == RunState.RUNNING,
    ),
    ("run_ranks", "ranks of the newest attempt", lambda row: row["world_size"]),
    ("run_attempts", "attempts so far", lambda row: row["attempts"]),
    (
        "run_committed_timestamp_seconds",
        "when the newest checkpoint was committed",
        lambda row: unix_time(row["committed_at"]),
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
    """Return all metrics in Prometheus' text format; those of the server if the index fails."""
    registry = CollectorRegistry(auto_describe=False)
    try:
        runs = list(_runs(services))
    # The server's own metrics are needed most while the index is down.
    except LineageError as error:
        LOG.warning("/metrics has no runs: %s", error)
        runs = []
    up = _gauge("index_up", "1 if the index answered this scrape, else 0", float(bool(runs)))
    registry.register(_Collector([*_server(services), up, *runs]))
    return generate_latest(registry) + generate_latest(services.measures.registry)


class _Collector:
    """The metrics that were computed for one scrape."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _server(services: Services) -> Iterable[Metric]:
    watch = services.watch
    lag_s = watch.lag_s()
    # A first round that never ends must raise an alert as well.
    lag_s = watch.age_s() if lag_s is None else lag_s
    yield _gauge("ingest_lag_seconds", "seconds since the index was up to date", lag_s)
    yield _gauge("ingest_round_seconds", "duration of the last round over the runs", watch.round_s)
    yield _gauge("ingest_problems", "roots and runs that cannot be read", watch.unreadable_count())
    yield _gauge("event_streams", "open event streams", services.hub.readers)


def _runs(services: Services) -> Iterable[Metric]:
    counts = Counter({str(state): 0 for state in RunState})
    counts.update(services.store.count_runs())
    by_state = GaugeMetricFamily("holdfast_runs", "runs by state", labels=["state"])
    for state, count in sorted(counts.items()):
        by_state.add_metric([state], count)
    yield by_state
    live: list[Row] = [
        {**row, "trained": pace.step if (pace := services.watch.pace(row["uid"])) else None}
        for row in services.store.live_runs()
    ]
    for name, text, read in _RUN_METRICS:
        family = GaugeMetricFamily(f"holdfast_{name}", f"{text}; live runs", labels=["run", "uid"])
        for row in live:
            value = read(row)
            if value is not None:
                family.add_metric([row["run"], row["uid"]], float(value))
        yield family


def _gauge(name: str, text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"holdfast_{name}", text)
    if value is not None:
        family.add_metric([], value)
    return family
