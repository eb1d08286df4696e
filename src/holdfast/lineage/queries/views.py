"""The dictionaries that queries return to the CLI, the API and the web UI, ready for JSON.

Times are ISO 8601 in UTC, durations are in seconds and sizes are in bytes. The id of a checkpoint
is `<run>:<directory>`. An edge reads `from` `kind` `to`: a parent edge goes from the child to the
parent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NotRequired, cast

from typing_extensions import TypedDict

from holdfast.contracts.disk.bounds import TIME_MAX
from holdfast.contracts.disk.paths import checkpoint_id
from holdfast.contracts.records.consumers import Use
from holdfast.contracts.spec.run_spec import steps_total
from holdfast.lineage.ingest.rows import attempt_node

Row = Mapping[str, Any]


class RunSummary(TypedDict):
    """One row of `holdfast runs`."""

    run: str
    name: str
    uid: str
    state: str
    reason: str | None
    step: int | None
    attempts: int
    world_size: int | None
    cause: str | None
    job_id: str | None
    root: str
    path: str
    spec_digest: str
    forked_from: str | None
    created_by: str
    created_at: str
    ended_at: str | None
    tags: list[str]


class RunRow(RunSummary):
    """One row of the web UI's list of runs: a summary, goodput and the newest losses (`spark`).

    `updated_at` is the time of the run's last change, and `partition` that of the spec.
    """

    partition: str | None
    updated_at: str
    committed_at: str | None
    steps_total: int | None
    goodput: dict[str, Any]  # contracts.goodput.Goodput until `updated_at`
    spark: list[float]


class StorageRow(TypedDict):
    """The storage of a run's checkpoints, and what the next prune would delete."""

    run: str
    uid: str
    name: str
    state: str
    root: str
    kept: int
    kept_bytes: int
    damaged: int
    damaged_bytes: int
    deleted: int
    deleted_bytes: int
    would_prune: list[str]
    would_prune_bytes: int


class AttemptView(TypedDict):
    """One attempt; `last_step` is the last step that any rank finished, committed or not.

    `world_size` is its number of ranks, and `gpus` its size as `elastic` counts it.
    """

    number: int
    state: str
    cause: str | None
    evidence: list[str]
    reason: str | None
    executor: str | None
    job_id: str | None
    nodes: list[str]
    world_size: int
    gpus: int
    command_digest: str | None
    resumed_from: str | None
    resumed_step: int | None
    first_step: int | None
    last_step: int | None
    committed_step: int | None
    steps: int | None
    launches: list[LaunchView]
    submitted_at: str | None
    started_at: str | None
    stop_requested_at: str | None
    stop_committed_at: str | None
    ended_at: str | None
    signal_to_commit_s: float | None
    failed_rank: int | None
    traceback: str | None
    code_commit: str | None
    code_digest: str | None
    config_digest: str | None
    data_digest: str | None
    environment_digest: str | None


class LaunchView(TypedDict):
    """One launch of torchrun inside an attempt."""

    number: int
    world_size: int | None
    command_digest: str | None
    resumed_from: str | None
    first_step: int | None
    last_step: int | None
    started_at: str | None
    ended_at: str | None
    ending: str | None
    exit_code: int | None


class StretchView(TypedDict):
    """The time and cost of attempts in a row at one place of `resources`: `contracts.stretches`."""

    place: int
    name: str
    first: int
    last: int
    began_at: float
    ended_at: float
    ettr: float
    steps_lost: int
    gpu_hours: float
    cost: float | None
    preemption_cost: float | None
    on_demand_cost: float | None
    saved: float | None
    currency: str | None


class ConsumerView(TypedDict):
    """A consumer of one checkpoint, and what became of it.

    `event` is that of the spec. `log` is the file with the output of the last start, null before
    the first one. `metrics` are those that the consumer reported.
    """

    name: str
    event: str
    checkpoint: str
    step: int
    state: str
    tries: int
    start: int
    log: str | None
    reason: str
    changed_at: str
    metrics: dict[str, float | str]


class RunView(TypedDict):
    """The output of `holdfast show RUN --json`."""

    run: str
    name: str
    uid: str
    state: str
    reason: str | None
    root: str
    path: str
    spec: dict[str, Any]
    spec_digest: str
    command_digest: str | None
    step: int | None
    goodput: dict[str, Any]  # contracts.goodput.Goodput
    stretches: list[StretchView]  # of a run with fallbacks, else empty
    attempts: list[AttemptView]
    consumers: list[ConsumerView]  # those that are not done yet, and the newest others
    forked_from: str | None
    flow_run: str | None
    created_by: str
    created_at: str
    ended_at: str | None
    tags: list[str]
    note: str | None
    note_by: str | None
    note_at: str | None


class CheckpointView(TypedDict):
    """One row of `holdfast checkpoints RUN`; `reason` is why it is kept, or why it was deleted."""

    id: str
    run: str
    step: int
    path: str
    state: str
    reason: str
    saved_for: str | None
    detail: str | None
    parent: str | None
    attempt: int
    launch: int
    world_size: int | None
    bytes: int | None
    files: int | None
    checksum: str | None
    command_digest: str | None
    blocked_s: float | None
    flush_s: float | None
    staged_at: str | None
    committed_at: str | None
    deleted_at: str | None
    pinned: bool
    rolled_back: bool
    metrics: dict[str, Any]
    versions: dict[str, Any]
    topology: dict[str, Any]
    pinned_by: str | None
    pinned_at: str | None
    pin_note: str | None
    deleted_by: str | None
    tags: list[str]
    note: str | None
    note_by: str | None
    note_at: str | None


class Node(TypedDict, total=False):
    """A node of the graph. Every node has `id` and `kind`; the other keys depend on the kind."""

    id: str
    kind: str
    run: str
    state: str
    step: int
    number: int
    cause: str | None
    world_size: int | None
    pinned: bool
    rolled_back: bool
    path: str
    verified: bool | None
    mirrored: bool
    # Of a fold, see `lineage.queries.folding`.
    count: int
    first_step: int
    last_step: int
    consumer: str


# The functional form, because `from` is a Python keyword.
Edge = TypedDict("Edge", {"from": str, "to": str, "kind": str})


class Graph(TypedDict):
    """The output of `holdfast lineage RUN`.

    The nodes are runs, attempts, checkpoints, paths, and the consumers of checkpoints.
    """

    nodes: list[Node]
    edges: list[Edge]
    # The number of nodes without folds, if there may be folds.
    nodes_total: NotRequired[int]


class EventView(TypedDict):
    """One journal line."""

    run: str
    journal: str
    opening: int
    sequence: int
    attempt: int | None
    time: str
    kind: str
    data: dict[str, Any]


def iso(time: float | None) -> str | None:
    """Return Unix seconds as ISO 8601 in UTC with milliseconds, or None for None."""
    return None if time is None else iso_time(time)


def iso_time(time: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC with milliseconds.

    The date and hour are cached, because a long list has ten thousand times. A number that is no
    time, in a row of an earlier version, becomes a text that says so.
    """
    if not 0 <= time <= TIME_MAX:
        return f"not a time: {time:.6g}"
    hour, within = divmod(round(time * 1e6), 3_600_000_000)
    minute, within = divmod(within, 60_000_000)
    second, micro = divmod(within, 1_000_000)
    return f"{_hour_of(hour)}:{minute:02d}:{second:02d}.{micro // 1000:03d}Z"


@functools.lru_cache(maxsize=4096)
def _hour_of(hours: int) -> str:
    """Return hours since 1970 as a date and hour, such as `2026-11-22T05`."""
    moment = datetime.fromtimestamp(hours * 3600, UTC).replace(tzinfo=None)
    return moment.isoformat(timespec="hours")


def run_row(row: Row) -> RunRow:
    """Return a row of the list of runs; see `pages.list_runs` for its columns."""
    config = row["config"] if isinstance(row["config"], dict) else {}
    own = {"path": row["directory"], "steps_total": steps_total(config)}
    own["partition"] = row["partition"] or None
    return cast(RunRow, _view(RunRow, row, **own, spark=row["spark"] or []))


def storage_row(run: Row, prunable: Sequence[Row]) -> StorageRow:
    """Return a run's storage; `prunable` are the checkpoints that a prune would delete."""
    names = [checkpoint_id(run["run"], one["name"]) for one in prunable]
    size = sum(one["bytes"] or 0 for one in prunable)
    return cast(StorageRow, _view(StorageRow, run, would_prune=names, would_prune_bytes=size))


def run_view(
    run: Row,
    attempts: list[AttemptView],
    goodput: dict[str, Any],
    stretches: list[StretchView],
    consumers: list[ConsumerView],
) -> RunView:
    own = {"goodput": goodput, "stretches": stretches, "attempts": attempts}
    own |= {"consumers": consumers, "path": run["directory"]}
    return cast(RunView, _view(RunView, run, **own))


def attempt_view(row: Row, launches: Iterable[Row], gpus: int) -> AttemptView:
    first, last = row["first_step"], row["last_step"]
    asked, committed = row["stop_requested_at"], row["stop_committed_at"]
    own = {
        "nodes": row["hosts"],
        "gpus": gpus,
        "steps": None if first is None or last is None else max(0, last - first + 1),
        "launches": [_view(LaunchView, launch) for launch in launches],
        "signal_to_commit_s": None if asked is None or committed is None else committed - asked,
    }
    return cast(AttemptView, _view(AttemptView, row, **own))


def checkpoint_view(run: str, row: Row, reason: str) -> CheckpointView:
    own = {"id": checkpoint_id(run, row["name"]), "run": run, "saved_for": row["reason"]}
    return cast(CheckpointView, _view(CheckpointView, row, **own, reason=reason))


def event_view(run: str, row: Row) -> EventView:
    return cast(EventView, _view(EventView, row, run=run, time=iso_time(row["time"])))


def _view(kind: type, row: Row, **own: Any) -> dict[str, Any]:
    """Return the view `kind` of a row: its columns of the same name, with times as text.

    `own` has the keys that differ from the row or that it lacks.
    """

    times = _times_of(kind)
    # Not a function for each value: a page of checkpoints has two thousand.
    return {
        name: own[name] if name in own else iso(row[name]) if name in times else row[name]
        for name in kind.__annotations__
    }


@functools.cache
def _times_of(kind: type) -> frozenset[str]:
    return frozenset(name for name in kind.__annotations__ if name.endswith("_at"))


def run_node(run: Row) -> Node:
    """Return the node of a run; its id is the folder's name."""
    return Node(id=run["run"], kind="run", run=run["run"], state=run["state"])


def attempt_node_of(run: str, row: Row) -> Node:
    return Node(
        id=f"{run}:{attempt_node(row['number'])}",
        kind="attempt",
        run=run,
        number=row["number"],
        state=row["state"],
        cause=row["cause"],
        world_size=row["world_size"],
    )


def checkpoint_node(run: str, row: Row) -> Node:
    return Node(
        id=checkpoint_id(run, row["name"]),
        kind="checkpoint",
        run=run,
        step=row["step"],
        state=row["state"],
        world_size=row["world_size"],
        pinned=row["pinned"],
        rolled_back=row["rolled_back"],
        path=row["path"],
    )


def consumer_node(run: str, use: Use) -> Node:
    """Return the node of a consumer of one checkpoint."""
    return Node(
        id=f"{checkpoint_id(run, use.checkpoint)}/{use.consumer}",
        kind="consumer",
        run=run,
        step=use.step,
        state=str(use.state),
        consumer=use.consumer,
    )
