"""The dictionaries that queries return to the CLI, the API and the web UI, ready for JSON.

Times are ISO 8601 in UTC, durations are in seconds and sizes are in bytes. The id of a checkpoint
is `<run>:<directory>`. An edge reads `from` `kind` `to`: a parent edge goes from the child to the
parent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from typing_extensions import TypedDict

from holdfast.contracts.paths import checkpoint_id
from holdfast.lineage.rows import attempt_node

Row = Mapping[str, Any]

STEPS_TOTAL_NAMES: Final = ("steps", "max_steps", "total_steps", "train_steps")


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


class RunRow(RunSummary):
    """One row of the web UI's list of runs: a summary, goodput and the newest losses (`spark`).

    `updated_at` is the time of the run's last change.
    """

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
    """One attempt; `last_step` is the last step that any rank finished, committed or not."""

    number: int
    state: str
    cause: str | None
    evidence: list[str]
    reason: str | None
    executor: str | None
    job_id: str | None
    nodes: list[str]
    world_size: int
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
    attempts: list[AttemptView]
    forked_from: str | None
    flow_run: str | None
    created_by: str
    created_at: str
    ended_at: str | None


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


# The functional form, because `from` is a Python keyword.
Edge = TypedDict("Edge", {"from": str, "to": str, "kind": str})


class Graph(TypedDict):
    """The output of `holdfast lineage RUN`: nodes are runs, attempts, checkpoints and exports."""

    nodes: list[Node]
    edges: list[Edge]


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

    The date and hour are cached, because a long list has ten thousand times.
    """
    hour, within = divmod(round(time * 1e6), 3_600_000_000)
    minute, within = divmod(within, 60_000_000)
    second, micro = divmod(within, 1_000_000)
    return f"{_hour_of(hour)}:{minute:02d}:{second:02d}.{micro // 1000:03d}Z"


@functools.lru_cache(maxsize=4096)
def _hour_of(hours: int) -> str:
    """Return hours since 1970 as a date and hour, such as `2026-11-22T05`."""
    moment = datetime.fromtimestamp(hours * 3600, UTC).replace(tzinfo=None)
    return moment.isoformat(timespec="hours")


def run_summary(run: Row, last: Row | None, attempts: int) -> RunSummary:
    """Return the summary of `run`, whose newest attempt of `attempts` is `last`."""
    return RunSummary(
        run=run["run"],
        name=run["name"],
        uid=run["uid"],
        state=run["state"],
        reason=run["reason"],
        step=run["step"],
        attempts=attempts,
        world_size=last["world_size"] if last else None,
        cause=last["cause"] if last else None,
        job_id=last["job_id"] if last else None,
        root=run["root"],
        path=run["directory"],
        spec_digest=run["spec_digest"],
        forked_from=run["forked_from"],
        created_by=run["created_by"],
        created_at=iso_time(run["created_at"]),
        ended_at=iso(run["ended_at"]),
    )


def run_row(run: Row, last: Row | None, attempts: int, spark: list[float]) -> RunRow:
    """Return a row of the web UI's list of runs; see `run_summary`. `spark`: newest losses."""
    return RunRow(
        **run_summary(run, last, attempts),
        updated_at=iso_time(run["updated_at"]),
        committed_at=iso(run["committed_at"]),
        steps_total=steps_total(run["spec"]),
        goodput=run["goodput"],
        spark=spark,
    )


def steps_total(spec: Mapping[str, Any]) -> int | None:
    """Return the number of steps to train if the run's config has one of `STEPS_TOTAL_NAMES`."""
    config = spec.get("config") or {}
    for name in STEPS_TOTAL_NAMES:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def storage_row(run: Row, prunable: Sequence[Row]) -> StorageRow:
    """Return a run's storage; `prunable` are the checkpoints that a prune would delete."""
    return StorageRow(
        run=run["run"],
        uid=run["uid"],
        name=run["name"],
        state=run["state"],
        root=run["root"],
        kept=run["kept"],
        kept_bytes=run["kept_bytes"],
        damaged=run["damaged"],
        damaged_bytes=run["damaged_bytes"],
        deleted=run["deleted"],
        deleted_bytes=run["deleted_bytes"],
        would_prune=[checkpoint_id(run["run"], one["name"]) for one in prunable],
        would_prune_bytes=sum(one["bytes"] or 0 for one in prunable),
    )


def run_view(run: Row, attempts: list[AttemptView], goodput: dict[str, Any]) -> RunView:
    """Return the view of one run."""
    return RunView(
        run=run["run"],
        name=run["name"],
        uid=run["uid"],
        state=run["state"],
        reason=run["reason"],
        root=run["root"],
        path=run["directory"],
        spec=run["spec"],
        spec_digest=run["spec_digest"],
        command_digest=run["command_digest"],
        step=run["step"],
        goodput=goodput,
        attempts=attempts,
        forked_from=run["forked_from"],
        flow_run=run["flow_run"],
        created_by=run["created_by"],
        created_at=iso_time(run["created_at"]),
        ended_at=iso(run["ended_at"]),
    )


def attempt_view(row: Row, launches: list[LaunchView]) -> AttemptView:
    """Return the view of one attempt with its launches."""
    first, last = row["first_step"], row["last_step"]
    asked, committed = row["stop_requested_at"], row["stop_committed_at"]
    return AttemptView(
        number=row["number"],
        state=row["state"],
        cause=row["cause"],
        evidence=row["evidence"],
        reason=row["reason"],
        executor=row["executor"],
        job_id=row["job_id"],
        nodes=row["hosts"],
        world_size=row["world_size"],
        command_digest=row["command_digest"],
        resumed_from=row["resumed_from"],
        resumed_step=row["resumed_step"],
        first_step=first,
        last_step=last,
        committed_step=row["committed_step"],
        steps=None if first is None or last is None else max(0, last - first + 1),
        launches=launches,
        submitted_at=iso(row["submitted_at"]),
        started_at=iso(row["started_at"]),
        stop_requested_at=iso(asked),
        stop_committed_at=iso(committed),
        ended_at=iso(row["ended_at"]),
        signal_to_commit_s=None if asked is None or committed is None else committed - asked,
        failed_rank=row["failed_rank"],
        traceback=row["traceback"],
        code_commit=row["code_commit"],
        code_digest=row["code_digest"],
        config_digest=row["config_digest"],
        data_digest=row["data_digest"],
        environment_digest=row["environment_digest"],
    )


def launch_view(row: Row) -> LaunchView:
    """Return the view of one launch."""
    return LaunchView(
        number=row["number"],
        world_size=row["world_size"],
        command_digest=row["command_digest"],
        resumed_from=row["resumed_from"],
        first_step=row["first_step"],
        last_step=row["last_step"],
        started_at=iso(row["started_at"]),
        ended_at=iso(row["ended_at"]),
        ending=row["ending"],
        exit_code=row["exit_code"],
    )


def checkpoint_view(run: str, row: Row, reason: str) -> CheckpointView:
    """Return the view of one checkpoint of the run in folder `run`."""
    return CheckpointView(
        id=checkpoint_id(run, row["name"]),
        run=run,
        step=row["step"],
        path=row["path"],
        state=row["state"],
        reason=reason,
        saved_for=row["reason"],
        detail=row["detail"],
        parent=row["parent"],
        attempt=row["attempt"],
        launch=row["launch"],
        world_size=row["world_size"],
        bytes=row["bytes"],
        files=row["files"],
        checksum=row["checksum"],
        command_digest=row["command_digest"],
        blocked_s=row["blocked_s"],
        flush_s=row["flush_s"],
        staged_at=iso(row["staged_at"]),
        committed_at=iso(row["committed_at"]),
        deleted_at=iso(row["deleted_at"]),
        pinned=row["pinned"],
        rolled_back=row["rolled_back"],
        metrics=row["metrics"],
        versions=row["versions"],
        topology=row["topology"],
        pinned_by=row["pinned_by"],
        pinned_at=iso(row["pinned_at"]),
        pin_note=row["pin_note"],
        deleted_by=row["deleted_by"],
    )


def event_view(run: str, row: Row) -> EventView:
    """Return the view of one journal line of the run in folder `run`."""
    return EventView(
        run=run,
        journal=row["journal"],
        opening=row["opening"],
        sequence=row["sequence"],
        attempt=row["attempt"],
        time=iso_time(row["time"]),
        kind=row["kind"],
        data=row["data"],
    )


def run_node(run: Row) -> Node:
    """Return the node of a run; its id is the folder's name."""
    return Node(id=run["run"], kind="run", run=run["run"], state=run["state"])


def attempt_node_of(run: str, row: Row) -> Node:
    """Return the node of an attempt."""
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
    """Return the node of a checkpoint."""
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
