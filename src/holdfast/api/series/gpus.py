"""The GPUs of a node over time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from holdfast.api.series.models import GpuSeries, GpuTrack, SeriesNode, TimeRange
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.plain_text import plain_line
from holdfast.workers.nodes import series_reading
from holdfast.workers.nodes.series import GPU_FIELDS

GIB: Final = 2.0**30
DIGITS: Final = 2


def read_gpus(run: str, attempt: AttemptPaths, node: int | None, within: TimeRange) -> GpuSeries:
    """Return the GPUs of `node`, or of the first node that has any."""
    listed = series_reading.list_series(attempt, "gpus")
    nodes = sorted({number for number, _ in listed})
    chosen = node if node is not None else next(iter(nodes), None)
    found, problems = series_reading.read_series(
        [path for number, path in listed if number == chosen], "gpus"
    )
    # Another machine may have become this node. The newest file counts.
    series = [one for one in found if len(one.start)][-1:]
    edges = within.edges(series)
    hosts = {one.header.node: plain_line(one.header.host) for one in found}
    return GpuSeries(
        run=run,
        attempt=attempt.number,
        nodes=[SeriesNode(node=each, host=hosts.get(each, f"node {each}")) for each in nodes],
        node=chosen,
        start_s=float(edges[0]),
        bucket_s=float(edges[1] - edges[0]) if len(edges) > 1 else 0.0,
        buckets=len(edges) - 1,
        gpus=[track for one in series for track in _tracks(one, edges)],
        problems=problems,
    )


def _tracks(series: series_reading.RecordedSeries, edges: Any) -> list[GpuTrack]:
    # A short fault or a peak must not vanish in a mean.
    mean, largest = (
        series_reading.mean_by_bucket(series, edges),
        series_reading.largest_by_bucket(series, edges),
    )
    field = {name: at for at, name in enumerate(GPU_FIELDS)}
    tracks = []
    for at in range(series.header.count):
        gpus = series.header.gpus
        shown = gpus[at] if at < len(gpus) else None
        tracks.append(
            GpuTrack(
                index=shown.index if shown else at,
                uuid=plain_line(shown.uuid) if shown else "",
                memory_total_bytes=shown.memory_total_bytes if shown else None,
                utilisation_percent=_numbers(mean[:, at, field["utilisation_percent"]]),
                memory_bytes=_numbers(largest[:, at, field["memory_gib"]], GIB),
                temperature_c=_numbers(largest[:, at, field["temperature_c"]]),
                power_w=_numbers(mean[:, at, field["power_w"]]),
                ecc_errors=_numbers(largest[:, at, field["ecc_errors"]]),
                xids=_numbers(largest[:, at, field["xid"]]),
            )
        )
    return tracks


def _numbers(values: Any, unit: float = 1.0) -> list[float | None]:
    return [None if np.isnan(one) else round(float(one) * unit, DIGITS) for one in values]
