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
from typing import Final

from holdfast.contracts.errors import HoldfastError
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.watch.rank_watch import RankWatch
from holdfast.workers.nodes.gpus import GpuBeat
from holdfast.workers.nodes.series import (
    FORMAT,
    GpuHeader,
    SeriesHeader,
    SeriesRow,
    SeriesWriter,
    gpu_values,
    rank_values,
)

# The width of a bucket. With hundreds of nodes it is wider: all of them write to one storage.
BUCKET_S: Final = 5.0
BUCKET_S_PER_NODE: Final = 0.02
STOP_WAIT_S: Final = 2.0


class _Files:
    """The files of this node at one place of the attempt."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._ranks: SeriesWriter | None = None
        self._gpus: SeriesWriter | None = None
        self._last_gpus: tuple[GpuBeat, ...] = ()

    def append_ranks(self, row: SeriesRow, count: int) -> None:
        if self._ranks is None:
            self._ranks = SeriesWriter(self._context.attempt.series, self._header("ranks", count))
        self._ranks.append(row)

    def append_gpus(self, row: SeriesRow, now: tuple[GpuBeat, ...]) -> None:
        if self._gpus is None:
            shown = tuple(
                GpuHeader(index=gpu.index, uuid=gpu.uuid, memory_total_bytes=gpu.memory_total_bytes)
                for gpu in now
            )
            header = self._header("gpus", len(now), shown)
            self._gpus = SeriesWriter(self._context.attempt.series, header)
        before, self._last_gpus = self._last_gpus, now
        # After a reset of the driver, it may list other GPUs.
        if len(now) == len(before or now):
            self._gpus.append(replace(row, values=gpu_values(before, now)))

    def _header(self, kind: str, count: int, gpus: tuple[GpuHeader, ...] = ()) -> SeriesHeader:
        context = self._context
        return SeriesHeader(
            format=FORMAT,
            kind=kind,
            node=context.node,
            host=context.host,
            count=count,
            gpus=gpus,
        )


class NodeSeries:
    """Writes a row for each bucket of time, until it is closed."""

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
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-series", daemon=True)
        self._thread.start()

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
            launch, began, began_at = self._launch(), time.monotonic(), time.time()
            is_last = self._over.wait(self._bucket_s)
            row = SeriesRow(began_at, time.monotonic() - began, launch, self._watch.first_rank, ())
            files, gpus, times = self._files, self._gpus(), self._watch.take_bucket()
            if gpus:
                with contextlib.suppress(OSError, HoldfastError):
                    files.append_gpus(row, gpus)
            # The ranks of two launches are two sets of processes.
            is_one_launch = launch == self._launch()
            if is_one_launch and any(not math.isnan(each.step_s) for each in times):
                with contextlib.suppress(OSError, HoldfastError):
                    files.append_ranks(replace(row, values=rank_values(times)), len(times))
