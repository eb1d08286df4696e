"""A thread that keeps the time series of this node's ranks and GPUs, for people.

It reads what the watches of ranks and GPUs have measured. A thread of its own, because storage that
does not answer may block it, and heartbeats must continue.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from holdfast.contracts.errors import HoldfastError
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.watch.rank_watch import RankWatch
from holdfast.workers.nodes import series
from holdfast.workers.nodes.gpus import GpuBeat

# The width of a bucket. With hundreds of nodes it is wider: all of them write to one storage.
BUCKET_S: Final = 5.0
BUCKET_S_PER_NODE: Final = 0.02
STOP_WAIT_S: Final = 2.0


class _Files:
    """The files of this node at one place of the attempt."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._ranks: series.SeriesWriter | None = None
        self._gpus: series.SeriesWriter | None = None
        self._last_gpus: tuple[GpuBeat, ...] = ()

    def append_ranks(self, row: series.SeriesRow, count: int) -> None:
        if self._ranks is None:
            self._ranks = series.SeriesWriter(
                self._context.attempt.series, self._header("ranks", count)
            )
        self._ranks.append(row)

    def append_gpus(self, row: series.SeriesRow, now: tuple[GpuBeat, ...]) -> None:
        if self._gpus is None:
            shown = tuple(
                series.GpuHeader(
                    index=gpu.index, uuid=gpu.uuid, memory_total_bytes=gpu.memory_total_bytes
                )
                for gpu in now
            )
            header = self._header("gpus", len(now), shown)
            self._gpus = series.SeriesWriter(self._context.attempt.series, header)
        before, self._last_gpus = self._last_gpus, now
        # After a reset of the driver, it may list other GPUs.
        if len(now) == len(before or now):
            self._gpus.append(replace(row, values=series.gpu_values(before, now)))

    def _header(
        self, kind: str, count: int, gpus: tuple[series.GpuHeader, ...] = ()
    ) -> series.SeriesHeader:
        context = self._context
        return series.SeriesHeader(
            format=series.FORMAT,
            kind=kind,
            node=context.node,
            host=context.host,
            count=count,
            gpus=gpus,
        )


class NodeSeries:
    """Writes a row for each bucket of time, until it is closed.

    The ranks of two launches are two sets of processes, so a bucket has those of one launch.
    """

    def __init__(
        self,
        context: AgentContext,
        watch: RankWatch,
        gpus: Callable[[], tuple[GpuBeat, ...]],
        launch: Callable[[], int],
    ) -> None:
        """`gpus` returns the newest data of the GPUs, and `launch` the current launch."""
        self._watch, self._gpus, self._launch = watch, gpus, launch
        self._bucket_s = max(BUCKET_S, BUCKET_S_PER_NODE * context.nodes_of_job)
        self._files = _Files(context)
        self._lock = threading.Lock()
        self._start = _Start.now()
        # The buckets that launches have ended, and the files that they belong to.
        self._ended: list[tuple[_Files, series.SeriesRow, list[series.RankTimes]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-series", daemon=True)
        self._thread.start()

    def end_bucket(self) -> None:
        """End the bucket of the ranks, before those of another launch are watched.

        The thread writes it, because the storage may not answer.
        """
        with self._lock:
            times, start, self._start = self._watch.take_bucket(), self._start, _Start.now()
            if any(not math.isnan(each.step_s) for each in times):
                row = start.row(self._launch(), self._watch.first_rank)
                self._ended.append((self._files, row, times))

    def move(self, context: AgentContext) -> None:
        """Begin new files: this node has another number from now on."""
        self._files = _Files(context)

    def close(self) -> None:
        """Write one last row and stop."""
        self._over.set()
        # Bounded, because the storage may not answer. The thread is a daemon.
        self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            start, launch = _Start.now(), self._launch()
            is_last = self._over.wait(self._bucket_s)
            if gpus := self._gpus():
                with contextlib.suppress(OSError, HoldfastError):
                    self._files.append_gpus(start.row(launch, self._watch.first_rank), gpus)
            self.end_bucket()
            with self._lock:
                ended, self._ended = self._ended, []
            for files, row, times in ended:
                with contextlib.suppress(OSError, HoldfastError):
                    files.append_ranks(replace(row, values=series.rank_values(times)), len(times))


class _Start(NamedTuple):
    """The start of a bucket, in Unix seconds and on the clock that no one sets."""

    at: float
    monotonic_s: float

    @classmethod
    def now(cls) -> _Start:
        return cls(time.time(), time.monotonic())

    def row(self, launch: int, first_rank: int) -> series.SeriesRow:
        """Return a row without values, from here until now."""
        return series.SeriesRow(
            self.at, time.monotonic() - self.monotonic_s, launch, first_rank, ()
        )
