"""The first tables: runs, attempts, launches, checkpoints, edges, journals and events."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# The values are repeated here, because a migration must not change with the enums in the code.
RUN_STATES = ("queued", "running", "waiting", "paused", "completed", "failed", "cancelled")
ATTEMPT_STATES = (
    *("created", "submitted", "pending", "running", "stopping", "completed", "preempted"),
    *("timed_out", "failed", "hung", "node_failed", "cancelled", "lost"),
)
CAUSES = (
    *("preemption", "time_limit", "node_failure", "hang", "host_oom", "gpu_oom", "storage_full"),
    *("numerics", "user_error", "infrastructure", "operator", "unknown"),
)
CHECKPOINT_STATES = ("committed", "damaged", "deleted")
EDGE_KINDS = ("parent", "resumed_from", "forked_from", "rolled_back", "exported_to")

TEXT = sa.Text()
NUMBER = sa.BigInteger()
REAL: sa.Double[float] = sa.Double()
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Upgrade the schema from the previous revision."""
    _create_runs()
    _create_attempts()
    _create_launches()
    _create_checkpoints()
    _create_edges()
    _create_journals()


def downgrade() -> None:
    """Revert `upgrade`."""
    for table in (
        *("events", "journals", "checkpoint_edges", "checkpoints", "launches", "attempts"),
        "runs",
    ):
        op.drop_table(table)


def _must(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False, autoincrement=False) for name in names]


def _may(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names]


def _one_of(table: str, column: str, words: tuple[str, ...]) -> sa.CheckConstraint:
    listing = ", ".join(f"'{word}'" for word in words)
    return sa.CheckConstraint(f"{column} IN ({listing})", name=op.f(f"ck_{table}_{column}"))


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=op.f(f"pk_{table}"))


def _of_run(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["run_uid"], ["runs.uid"], name=op.f(f"fk_{table}_run_uid_runs"), ondelete="CASCADE"
    )


def _index(table: str, *columns: str) -> None:
    op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, list(columns))


def _create_runs() -> None:
    op.create_table(
        "runs",
        *_must(TEXT, "uid", "run", "name", "root", "directory", "state"),
        *_may(TEXT, "reason"),
        *_must(DOCUMENT, "spec"),
        *_must(TEXT, "spec_digest"),
        *_may(TEXT, "command_digest"),
        *_must(REAL, "created_at"),
        *_must(TEXT, "created_by"),
        *_may(REAL, "ended_at"),
        *_may(TEXT, "forked_from", "forked_uid", "forked_path"),
        *_may(NUMBER, "step"),
        *_may(TEXT, "flow_run"),
        *_must(TEXT, "fingerprint"),
        _one_of("runs", "state", RUN_STATES),
        _key("runs", "uid"),
    )
    _index("runs", "created_at")
    _index("runs", "run", "created_at")
    _index("runs", "name", "created_at")
    _index("runs", "state")


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        *_must(TEXT, "run_uid"),
        *_must(sa.Integer(), "number"),
        *_must(TEXT, "state"),
        *_may(TEXT, "cause"),
        *_must(DOCUMENT, "evidence"),
        *_may(TEXT, "reason", "executor", "job_id", "job_name"),
        *_must(DOCUMENT, "hosts"),
        *_may(NUMBER, "nodes"),
        *_must(NUMBER, "world_size"),
        *_may(TEXT, "command_digest", "resumed_from"),
        *_may(NUMBER, "resumed_step", "first_step", "last_step", "committed_step"),
        *_may(REAL, "created_at", "submitted_at", "started_at", "stop_requested_at"),
        *_may(REAL, "stop_committed_at", "ended_at"),
        *_may(TEXT, "traceback"),
        *_may(NUMBER, "failed_rank"),
        _one_of("attempts", "state", ATTEMPT_STATES),
        _one_of("attempts", "cause", CAUSES),
        _of_run("attempts"),
        _key("attempts", "run_uid", "number"),
    )
    _index("attempts", "job_id")


def _create_launches() -> None:
    op.create_table(
        "launches",
        *_must(TEXT, "run_uid"),
        *_must(sa.Integer(), "attempt", "number"),
        *_may(NUMBER, "world_size"),
        *_may(TEXT, "command_digest", "resumed_from"),
        *_may(NUMBER, "resumed_step", "first_step", "last_step"),
        *_may(REAL, "started_at", "trained_from", "ended_at"),
        *_may(TEXT, "ending"),
        *_may(NUMBER, "exit_code"),
        sa.ForeignKeyConstraint(
            ["run_uid", "attempt"],
            ["attempts.run_uid", "attempts.number"],
            name=op.f("fk_launches_run_uid_attempt_attempts"),
            ondelete="CASCADE",
        ),
        _key("launches", "run_uid", "attempt", "number"),
    )


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        *_must(TEXT, "run_uid", "name"),
        *_must(NUMBER, "step", "attempt", "launch"),
        *_must(TEXT, "state"),
        *_may(TEXT, "detail"),
        *_must(TEXT, "path"),
        *_may(TEXT, "reason"),
        *_may(NUMBER, "world_size"),
        *_may(TEXT, "parent", "parent_uid", "parent_name"),
        *_may(NUMBER, "bytes", "files"),
        *_may(TEXT, "checksum", "command_digest"),
        *_may(REAL, "blocked_s", "flush_s", "staged_at", "committed_at"),
        *_must(DOCUMENT, "metrics"),
        *_must(sa.Boolean(), "pinned", "rolled_back"),
        *_may(TEXT, "deleted_reason", "deleted_by"),
        *_may(REAL, "deleted_at"),
        *_must(TEXT, "stamp"),
        _one_of("checkpoints", "state", CHECKPOINT_STATES),
        sa.CheckConstraint("step >= 0", name=op.f("ck_checkpoints_step")),
        sa.CheckConstraint("bytes >= 0", name=op.f("ck_checkpoints_bytes")),
        _of_run("checkpoints"),
        _key("checkpoints", "run_uid", "name"),
    )
    _index("checkpoints", "run_uid", "step")
    _index("checkpoints", "parent_uid", "parent_name")


def _create_edges() -> None:
    op.create_table(
        "checkpoint_edges",
        *_must(TEXT, "id", "run_uid", "kind", "source_uid", "source_run", "source"),
        *_may(TEXT, "target_uid", "target_run"),
        *_must(TEXT, "target"),
        _one_of("checkpoint_edges", "kind", EDGE_KINDS),
        _of_run("checkpoint_edges"),
        _key("checkpoint_edges", "id"),
    )
    _index("checkpoint_edges", "run_uid")
    _index("checkpoint_edges", "source_uid")
    _index("checkpoint_edges", "target_uid")


def _create_journals() -> None:
    op.create_table(
        "journals",
        *_must(TEXT, "run_uid", "journal"),
        *_must(NUMBER, "lines"),
        _of_run("journals"),
        _key("journals", "run_uid", "journal"),
    )
    op.create_table(
        "events",
        *_must(TEXT, "run_uid", "journal"),
        *_must(NUMBER, "opening", "sequence"),
        *_may(NUMBER, "attempt"),
        *_must(REAL, "time"),
        *_must(TEXT, "kind"),
        *_must(DOCUMENT, "data"),
        sa.ForeignKeyConstraint(
            ["run_uid", "journal"],
            ["journals.run_uid", "journals.journal"],
            name=op.f("fk_events_run_uid_journal_journals"),
            ondelete="CASCADE",
        ),
        _key("events", "run_uid", "journal", "opening", "sequence"),
    )
    _index("events", "run_uid", "time")
    _index("events", "time")
