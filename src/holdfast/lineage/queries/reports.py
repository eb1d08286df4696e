"""Dictionaries for JSON about machines, metrics, comparisons and ancestries; see also `views`.

Times are ISO 8601 in UTC, unless the name ends in a unit. Sizes are in bytes.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class NodeRow(TypedDict):
    """A machine: the number of its attempts and of the failures attributed to it, by cause."""

    host: str
    attempts: int
    failures: int
    faults: dict[str, int]
    last_started_at: str | None
    last_failed_at: str | None


class NodeFault(TypedDict):
    """An attempt's failure that is attributed to a machine."""

    run: str
    attempt: int
    cause: str
    started_at: str | None
    ended_at: str | None


class Segment(TypedDict):
    """A period in which an attempt did one thing; `part` is one of `contracts.goodput.PARTS`."""

    attempt: int
    part: str
    began_at: str
    ended_at: str


class Spread(TypedDict):
    """The last, lowest and highest value of a metric in a range of steps.

    They are null if no value was finite.
    """

    last: float | None
    low: float | None
    high: float | None


class Point(TypedDict):
    """A range of steps on a curve; `step` is its last step and `time_s` is Unix seconds."""

    step: int
    time: str
    time_s: float
    steps_per_s: float | None
    values: dict[str, Spread]


class Series(TypedDict):
    """The metrics of one launch, oldest first."""

    attempt: int
    launch: int
    points: list[Point]


class Fact(TypedDict):
    """One fact of two checkpoints; `is_same` is null if it is unknown for either of them."""

    name: str
    one: Any
    other: Any
    is_same: bool | None


class RunsFact(TypedDict):
    """One fact of several runs, in their order; `is_same` is null if it is unknown for one.

    `group` is arguments, settings, code, environment or outcome. An absent setting is null.
    """

    group: str
    name: str
    values: list[Any]
    is_same: bool | None


class RunsComparison(TypedDict):
    """A comparison of runs. `left_out` is how many equal facts were too many to list."""

    runs: list[str]
    facts: list[RunsFact]
    left_out: int


class Comparison(TypedDict):
    """A comparison of two checkpoints; `config` contains all keys of their runs' specs."""

    one: str
    other: str
    common_ancestor: str | None
    facts: list[Fact]
    config: list[Fact]
    metrics: list[Fact]


class FileView(TypedDict):
    """One file of a checkpoint."""

    path: str
    bytes: int
    checksum: str


class Ancestor(TypedDict):
    """One checkpoint of an ancestry."""

    id: str
    run: str
    step: int
    attempt: int
    path: str
    state: str
    parent: str | None
    world_size: int | None
    bytes: int | None
    checksum: str | None
    committed_at: str | None
    pinned: bool
    rolled_back: bool
