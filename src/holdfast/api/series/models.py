"""The models of the answers about ranks and GPUs over time, and the range that a request gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from pydantic import BaseModel, Field

from holdfast.workers.nodes.series_reading import Floats, RecordedSeries


class HeatValue(StrEnum):
    """What a heat map of the ranks shows, in seconds per step.

    `step` is the whole step, `data` the wait for the next batch, `others` the wait for other ranks,
    and `own` the step without the wait for others.
    """

    STEP = "step"
    DATA = "data"
    OTHERS = "others"
    OWN = "own"


class HeatHost(BaseModel):
    """The ranks that a node had last."""

    node: int
    host: str
    first_rank: int
    ranks: int


class HeatLaunch(BaseModel):
    """A launch, and when its first bucket began, in Unix seconds."""

    launch: int
    start_s: float


class RankMeans(BaseModel):
    """A rank's mean seconds per step in the range of time."""

    rank: int
    node: int
    host: str
    step_s: float | None
    data_s: float | None
    others_s: float | None
    own_s: float | None
    peers_s: float | None = Field(description="The median of `own_s` over all ranks")
    slow_share: float = Field(
        description="The share of its buckets in which its own time was well above the median"
    )
    is_straggler: bool = Field(description="True if there were several such buckets")


class HeatMap(BaseModel):
    """One value of each rank over time.

    Bucket `n` begins at `start_s` + `n` × `bucket_s`, in Unix seconds. `rows` has a text for each
    rank from `first_rank` on, with one character for each bucket. The character number `k` of
    `alphabet` stands for `lowest_s` × `ratio` to the power of `k` − 1, and number 0 for no value.
    """

    run: str
    attempt: int
    value: HeatValue
    start_s: float
    bucket_s: float
    buckets: int
    first_rank: int
    ranks_total: int = Field(description="One more than the highest rank, whatever was asked for")
    alphabet: str
    lowest_s: float
    ratio: float
    rows: list[str]
    hosts: list[HeatHost]
    launches: list[HeatLaunch]
    worst: list[RankMeans] = Field(description="The ranks that most held up the others come first")
    problems: list[str]


class SeriesNode(BaseModel):
    """A node whose GPUs have a series."""

    node: int
    host: str


class GpuTrack(BaseModel):
    """A GPU over time: one number for each bucket, null without data.

    `ecc_errors` counts new uncorrected errors, and `xids` has the code of a new Xid error, 0
    without one.
    """

    index: int
    uuid: str
    memory_total_bytes: int | None
    utilisation_percent: list[float | None]
    memory_bytes: list[float | None]
    temperature_c: list[float | None]
    power_w: list[float | None]
    ecc_errors: list[float | None]
    xids: list[float | None]


class GpuSeries(BaseModel):
    """The GPUs of a node over time. Bucket `n` begins at `start_s` + `n` × `bucket_s`."""

    run: str
    attempt: int
    nodes: list[SeriesNode] = Field(description="All nodes of the attempt whose GPUs have data")
    node: int | None
    start_s: float
    bucket_s: float
    buckets: int
    gpus: list[GpuTrack]
    problems: list[str]


# No answer has more detail than the files.
BUCKET_S_MIN = 1.0


@dataclass(frozen=True)
class TimeRange:
    """The range that a request asks for, in Unix seconds; None is the first or the last row."""

    start: float | None
    end: float | None
    buckets: int

    def edges(self, found: Sequence[RecordedSeries]) -> Floats:
        """Return the bounds of the buckets, only the first one without any row in the range.

        A short range has fewer buckets.
        """
        starts = [one.start[0] for one in found if len(one.start)]
        ends = [one.end[-1] for one in found if len(one.end)]
        if not starts:
            return np.array([self.start or 0.0])
        start, end = max(self.start or 0.0, min(starts)), max(ends)
        if self.end is not None:
            end = min(end, self.end)
        if end <= start:
            return np.array([start])
        width = max(BUCKET_S_MIN, (end - start) / self.buckets)
        count = max(1, min(self.buckets, round((end - start) / width)))
        return np.linspace(start, end, count + 1)
