"""The tables. Times are Unix seconds, durations are in seconds and sizes are in bytes.

Text columns are unbounded. All rows are derived from disk. A checkpoint is identified by its
run's uid and its directory name, because runs in two roots can have the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Text,
    false,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.lineage.database.states import STORED_EDGES, CheckpointState


class Base(DeclarativeBase):
    """The base of all tables. It sets constraint names that are the same in every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads this name from the class
        str: Text(),
        int: BigInteger(),
        float: Double(),
        dict[str, Any]: JSON().with_variant(JSONB(), "postgresql"),
        list[str]: JSON().with_variant(JSONB(), "postgresql"),
        list[float]: JSON().with_variant(JSONB(), "postgresql"),
    }


def _listing(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


def _one_of(column: str, values: type[StrEnum]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({_listing(values)})", name=column)


def _part_of(table: str, **columns: str) -> ForeignKeyConstraint:
    """Return a key that refers to the same run in `table`; `columns` maps own to other names."""
    own = {"run_uid": "run_uid", **columns}
    others = [f"{table}.{name}" for name in own.values()]
    return ForeignKeyConstraint(list(own), others, ondelete="CASCADE")


TextKey = Annotated[str, mapped_column(primary_key=True)]
NumberKey = Annotated[int, mapped_column(Integer, primary_key=True, autoincrement=False)]
BigNumberKey = Annotated[int, mapped_column(primary_key=True, autoincrement=False)]
RunKey = Annotated[str, mapped_column(ForeignKey("runs.uid", ondelete="CASCADE"), primary_key=True)]


class Run(Base):
    """One run: its `spec.json` and a summary of its attempts and journals.

    `updated_at` is the newest time in its folder. `goodput` covers the time until the end of the
    run, or until `updated_at` if it is live. `root_id` is the UUID of its root. `unknown_kinds`
    are the event kinds that the version which wrote the row did not know. `world_size` is that of
    the newest attempt. `kept`, `damaged` and `deleted` count checkpoints by state. `owner_uid`,
    `reader_gid` and `is_public` say who may read the folder, see `permissions`.
    """

    __tablename__ = "runs"
    __table_args__ = (
        _one_of("state", RunState),
        Index(None, "created_at", "uid"),
        Index(None, "updated_at", "uid"),
        Index(None, "name", "uid"),
        Index(None, "run", "created_at"),
        Index(None, "state", "created_at", "uid"),
        Index(None, "owner_uid"),
        # A path may be too long for a B-tree index of PostgreSQL.
        Index(None, "root", postgresql_using="hash"),
    )

    uid: Mapped[TextKey]
    run: Mapped[str]
    name: Mapped[str]
    root: Mapped[str]
    directory: Mapped[str]
    state: Mapped[str]
    reason: Mapped[str | None]
    spec: Mapped[dict[str, Any]]
    spec_digest: Mapped[str]
    command_digest: Mapped[str | None]
    created_at: Mapped[float]
    created_by: Mapped[str]
    ended_at: Mapped[float | None]
    forked_from: Mapped[str | None]
    forked_uid: Mapped[str | None]
    forked_path: Mapped[str | None]
    step: Mapped[int | None]
    flow_run: Mapped[str | None]
    updated_at: Mapped[float]
    committed_at: Mapped[float | None]
    goodput: Mapped[dict[str, Any]]
    fingerprint: Mapped[str]
    root_id: Mapped[str] = mapped_column(server_default="")
    unknown_kinds: Mapped[list[str]] = mapped_column(server_default="[]")
    attempts: Mapped[int] = mapped_column(server_default="0")
    world_size: Mapped[int | None]
    kept: Mapped[int] = mapped_column(server_default="0")
    kept_bytes: Mapped[int] = mapped_column(server_default="0")
    damaged: Mapped[int] = mapped_column(server_default="0")
    damaged_bytes: Mapped[int] = mapped_column(server_default="0")
    deleted: Mapped[int] = mapped_column(server_default="0")
    deleted_bytes: Mapped[int] = mapped_column(server_default="0")
    owner_uid: Mapped[int | None]
    reader_gid: Mapped[int | None]
    is_public: Mapped[bool] = mapped_column(server_default=false())


class Attempt(Base):
    """One attempt: one scheduler job of a run. The digests are from its request."""

    __tablename__ = "attempts"
    __table_args__ = (
        _one_of("state", AttemptState),
        _one_of("cause", Cause),
        Index(None, "job_id"),
    )

    run_uid: Mapped[RunKey]
    number: Mapped[NumberKey]
    state: Mapped[str]
    cause: Mapped[str | None]
    evidence: Mapped[list[str]]
    reason: Mapped[str | None]
    executor: Mapped[str | None]
    job_id: Mapped[str | None]
    job_name: Mapped[str | None]
    hosts: Mapped[list[str]]
    nodes: Mapped[int | None]
    world_size: Mapped[int]
    command_digest: Mapped[str | None]
    resumed_from: Mapped[str | None]
    resumed_step: Mapped[int | None]
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    committed_step: Mapped[int | None]
    created_at: Mapped[float | None]
    submitted_at: Mapped[float | None]
    started_at: Mapped[float | None]
    stop_requested_at: Mapped[float | None]
    stop_committed_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    traceback: Mapped[str | None]
    failed_rank: Mapped[int | None]
    code_commit: Mapped[str | None]
    code_digest: Mapped[str | None]
    config_digest: Mapped[str | None]
    data_digest: Mapped[str | None]
    environment_digest: Mapped[str | None]


class AttemptNodeRow(Base):
    """A node of an attempt; `fault` is the failure's cause if it is attributed to this node."""

    __tablename__ = "attempt_nodes"
    __table_args__ = (
        _part_of("attempts", attempt="number"),
        _one_of("fault", Cause),
        Index(None, "host", "fault", "started_at"),
    )

    run_uid: Mapped[TextKey]
    attempt: Mapped[NumberKey]
    host: Mapped[TextKey]
    fault: Mapped[str | None]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]


class LaunchRow(Base):
    """One launch of torchrun inside an attempt."""

    __tablename__ = "launches"
    __table_args__ = (_part_of("attempts", attempt="number"),)

    run_uid: Mapped[TextKey]
    attempt: Mapped[NumberKey]
    number: Mapped[NumberKey]
    world_size: Mapped[int | None]
    command_digest: Mapped[str | None]
    resumed_from: Mapped[str | None]
    resumed_step: Mapped[int | None]
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    started_at: Mapped[float | None]
    trained_from: Mapped[float | None]
    ended_at: Mapped[float | None]
    ending: Mapped[str | None]
    exit_code: Mapped[int | None]


# A child never has a smaller step than its parent, and equal steps in one run are ordered by
# name, so these rows cannot form a cycle. A trigger rejects cycles of equal steps across runs.
PARENT_IS_EARLIER: Final = (
    "parent_uid IS NULL OR (parent_name IS NOT NULL AND parent_step IS NOT NULL "
    "AND (parent_step < step OR (parent_step = step AND (parent_uid <> run_uid "
    "OR length(parent_name) < length(name) "
    "OR (length(parent_name) = length(name) AND parent_name < name)))))"
)


class Checkpoint(Base):
    """One checkpoint that was committed at some time. Directories without manifest have no row.

    `parent` is taken from the manifest. `parent_uid`, `parent_name` and `parent_step` are null if
    that checkpoint cannot be an ancestor.
    """

    __tablename__ = "checkpoints"
    __table_args__ = (
        _one_of("state", CheckpointState),
        CheckConstraint("step >= 0", name="step"),
        CheckConstraint("bytes >= 0", name="bytes"),
        CheckConstraint(PARENT_IS_EARLIER, name="parent"),
        Index(None, "run_uid", "step", "attempt", "launch", unique=True),
        Index(None, "run_uid", "state", "step", "attempt", "launch"),
        Index(None, "parent_uid", "parent_name"),
    )

    run_uid: Mapped[RunKey]
    name: Mapped[TextKey]
    step: Mapped[int]
    attempt: Mapped[int]
    launch: Mapped[int]
    state: Mapped[str]
    detail: Mapped[str | None]
    path: Mapped[str]
    reason: Mapped[str | None]
    world_size: Mapped[int | None]
    parent: Mapped[str | None]
    parent_uid: Mapped[str | None]
    parent_name: Mapped[str | None]
    parent_step: Mapped[int | None]
    bytes: Mapped[int | None]
    files: Mapped[int | None]
    checksum: Mapped[str | None]
    command_digest: Mapped[str | None]
    blocked_s: Mapped[float | None]
    flush_s: Mapped[float | None]
    staged_at: Mapped[float | None]
    committed_at: Mapped[float | None]
    metrics: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]]
    topology: Mapped[dict[str, Any]]
    pinned: Mapped[bool]
    pinned_by: Mapped[str | None]
    pinned_at: Mapped[float | None]
    pin_note: Mapped[str | None]
    rolled_back: Mapped[bool]
    deleted_reason: Mapped[str | None]
    deleted_by: Mapped[str | None]
    deleted_at: Mapped[float | None]
    stamp: Mapped[str]


class CheckpointFile(Base):
    """One file of a checkpoint; `number` is its position in the manifest."""

    __tablename__ = "checkpoint_files"
    __table_args__ = (_part_of("checkpoints", checkpoint="name"),)

    run_uid: Mapped[TextKey]
    checkpoint: Mapped[TextKey]
    number: Mapped[NumberKey]
    path: Mapped[str]
    bytes: Mapped[int]
    checksum: Mapped[str]


class CheckpointEdge(Base):
    """One lineage edge, recorded in the folder of `run_uid`. Parents are in `checkpoints`.

    `source` and `target` are a checkpoint's directory name, `attempt-NNNN`, the empty string for
    the run itself, or the path of an export, whose `target_uid` is null. The id is a digest of all
    other columns, because a path may be too long for an index of PostgreSQL.
    """

    __tablename__ = "checkpoint_edges"
    __table_args__ = (
        CheckConstraint(f"kind IN ({_listing(STORED_EDGES)})", name="kind"),
        Index(None, "run_uid"),
        Index(None, "source_uid"),
        Index(None, "target_uid"),
    )

    id: Mapped[TextKey]
    run_uid: Mapped[str] = mapped_column(ForeignKey("runs.uid", ondelete="CASCADE"))
    kind: Mapped[str]
    source_uid: Mapped[str]
    source_run: Mapped[str]
    source: Mapped[str]
    target_uid: Mapped[str | None]
    target_run: Mapped[str | None]
    target: Mapped[str]


class Journal(Base):
    """The number of lines read from a journal; `journal` is its path in the run's folder."""

    __tablename__ = "journals"

    run_uid: Mapped[RunKey]
    journal: Mapped[TextKey]
    lines: Mapped[int]


class EventRow(Base):
    """One journal line. Its kind is unconstrained: a newer version may have written it."""

    __tablename__ = "events"
    __table_args__ = (
        _part_of("journals", journal="journal"),
        Index(None, "run_uid", "time", "journal", "opening", "sequence"),
        Index(None, "run_uid", "kind", "time"),
    )

    run_uid: Mapped[TextKey]
    journal: Mapped[TextKey]
    opening: Mapped[BigNumberKey]
    sequence: Mapped[BigNumberKey]
    attempt: Mapped[int | None]
    time: Mapped[float]
    kind: Mapped[str]
    data: Mapped[dict[str, Any]]


class MetricFile(Base):
    """The read position in a metrics file: `offset` bytes, in buckets of `stride` steps.

    `spark` has a few values of the loss, oldest first, for the sparkline in the list of runs.
    """

    __tablename__ = "metric_files"

    run_uid: Mapped[RunKey]
    attempt: Mapped[BigNumberKey]
    launch: Mapped[BigNumberKey]
    offset: Mapped[int]
    stride: Mapped[int]
    spark: Mapped[list[float]]


class Metric(Base):
    """One bucket of metrics, which begins at step `bucket`.

    `step` and `time` are from the last line in the bucket. `data` maps each metric's name to
    (step of the last value, last value, lowest value, highest value).
    """

    __tablename__ = "metrics"
    __table_args__ = (_part_of("metric_files", attempt="attempt", launch="launch"),)

    run_uid: Mapped[TextKey]
    attempt: Mapped[BigNumberKey]
    launch: Mapped[BigNumberKey]
    bucket: Mapped[BigNumberKey]
    step: Mapped[int]
    time: Mapped[float]
    data: Mapped[dict[str, Any]]


class Compatibility(Base):
    """A single row: the oldest revision whose programs can still read and write this schema."""

    __tablename__ = "compatibility"

    oldest: Mapped[TextKey]


TABLES: Final = (
    *(Run, Attempt, LaunchRow, AttemptNodeRow, Checkpoint, CheckpointFile, CheckpointEdge),
    *(Journal, EventRow, MetricFile, Metric),
)
