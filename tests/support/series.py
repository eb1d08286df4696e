"""Series of ranks and GPUs, written as an agent writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.workers.nodes.gpus import GpuBeat
from holdfast.workers.nodes.series import (
    FORMAT,
    GpuHeader,
    RankTimes,
    SeriesHeader,
    SeriesRow,
    SeriesWriter,
    gpu_values,
    rank_values,
)

# The times of a rank in a bucket, by rank and bucket.
Times = Callable[[int, int], RankTimes]


def header(kind: str, count: int, node: int = 0, **more: object) -> SeriesHeader:
    facts = {"format": FORMAT, "kind": kind, "node": node, "host": f"node-{node}", "count": count}
    return SeriesHeader.model_validate({**facts, **more})


def write_ranks(
    attempt: AttemptPaths,
    times: Times,
    *,
    start: float,
    buckets: int,
    node: int = 0,
    count: int = 2,
    width_s: float = 10.0,
    launch: int = 1,
    **more: object,
) -> SeriesWriter:
    """Write a node's file: `buckets` buckets of `count` ranks. `more` is for its header."""
    writer = SeriesWriter(attempt.series, header("ranks", count, node, **more))
    add_ranks(
        writer,
        times,
        start=start,
        buckets=range(buckets),
        ranks=range(node * count, (node + 1) * count),
        width_s=width_s,
        launch=launch,
    )
    return writer


def add_ranks(
    writer: SeriesWriter,
    times: Times,
    *,
    start: float,
    buckets: Iterable[int],
    ranks: range,
    width_s: float = 10.0,
    launch: int = 1,
) -> None:
    for bucket in buckets:
        values = rank_values(times(rank, bucket) for rank in ranks)
        writer.append(SeriesRow(start + bucket * width_s, width_s, launch, ranks.start, values))


def write_gpus(
    attempt: AttemptPaths,
    beats: Iterable[tuple[GpuBeat, ...]],
    *,
    start: float,
    node: int = 0,
    width_s: float = 10.0,
    **more: object,
) -> None:
    """Write a node's file of GPUs: a row for each of `beats`."""
    writer, before = None, tuple[GpuBeat, ...]()
    for bucket, now in enumerate(beats):
        if writer is None:
            shown = [
                GpuHeader(index=g.index, uuid=g.uuid, memory_total_bytes=g.memory_total_bytes)
                for g in now
            ]
            writer = SeriesWriter(
                attempt.series, header("gpus", len(now), node, gpus=shown, **more)
            )
        values = gpu_values(before, now)
        writer.append(SeriesRow(start + bucket * width_s, width_s, 1, 0, values))
        before = now


def sample_gpu(index: int, bucket: int, fails_at: int | None = None) -> GpuBeat:
    """A GPU that works hard until it fails: with Xid 79 and errors of its memory."""
    has_failed = fails_at is not None and bucket >= fails_at
    return GpuBeat(
        index=index,
        uuid=f"GPU-5a2e4f3c-9d1b-4c7e-8f6a-0b1c2d3e4f5{index}",
        memory_used_bytes=(60 + index) << 30,
        memory_total_bytes=80 << 30,
        utilisation_percent=0 if has_failed else 97 - index,
        temperature_c=60 + index + (bucket // 25) % 4,
        power_w=120 if has_failed else 640 + 5 * index,
        ecc_uncorrected=2 if has_failed else 0,
        xids=(79,) if has_failed else (),
        xids_seen=int(has_failed),
    )


def write_scene(
    attempt: AttemptPaths, times: Times, *, start: float, nodes: int, per_node: int, buckets: int
) -> None:
    """Write the files of many nodes without an append for each row."""
    attempt.series.mkdir(parents=True, exist_ok=True)
    for node in range(nodes):
        first = node * per_node
        rows = (
            SeriesRow(
                start + 10.0 * bucket,
                10.0,
                1,
                first,
                rank_values(times(rank, bucket) for rank in range(first, first + per_node)),
            )
            for bucket in range(buckets)
        )
        head = header("ranks", per_node, node).model_dump_json(exclude_none=True).encode()
        content = head + b"\n" + b"".join(row.pack() for row in rows)
        (attempt.series / f"ranks-{node:04d}.1.bin").write_bytes(content)
