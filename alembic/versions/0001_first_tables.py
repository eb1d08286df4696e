"""The first tables.

A later migration that only adds tables, or columns with defaults, leaves `compatibility.oldest` as
it is: programs of older revisions can still read and write the schema. One that breaks them raises
the value.
"""

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
COUNTS = (
    *("attempts", "kept", "kept_bytes", "damaged", "damaged_bytes"),
    *("deleted", "deleted_bytes"),
)
DIGESTS = ("code_commit", "code_digest", "config_digest", "data_digest", "environment_digest")
CHECKPOINT_STATES = ("committed", "damaged", "deleted")
EDGE_KINDS = ("resumed_from", "forked_from", "rolled_back", "exported_to", "imported_from")
PARENT_IS_EARLIER = (
    "parent_uid IS NULL OR (parent_name IS NOT NULL AND parent_step IS NOT NULL "
    "AND (parent_step < step OR (parent_step = step AND (parent_uid <> run_uid "
    "OR length(parent_name) < length(name) "
    "OR (length(parent_name) = length(name) AND parent_name < name)))))"
)
# Follows the parents of NEW that have the same step. There are few of them.
WALK = (
    "WITH RECURSIVE line(uid, name) AS (SELECT NEW.parent_uid, NEW.parent_name UNION "
    "SELECT c.parent_uid, c.parent_name FROM checkpoints c JOIN line "
    "ON c.run_uid = line.uid AND c.name = line.name "
    "WHERE c.parent_uid IS NOT NULL AND c.parent_step = NEW.step) "
    "SELECT 1 FROM line WHERE uid = NEW.run_uid AND name = NEW.name"
)
MESSAGE = "a checkpoint would be its own ancestor"

TEXT = sa.Text()
NUMBER = sa.BigInteger()
REAL: sa.Double[float] = sa.Double()
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Create the tables."""
    _create_runs()
    _create_attempts()
    _create_parts_of_attempts()
    _create_checkpoints()
    _create_parts_of_checkpoints()
    _create_journals()
    _create_metrics()
    _create_guard()
    op.create_table("compatibility", *_must(TEXT, "oldest"), _key("compatibility", "oldest"))
    op.execute(f"INSERT INTO compatibility (oldest) VALUES ('{revision}')")


def downgrade() -> None:
    """Revert `upgrade`. A table's trigger is dropped with it, its function on PostgreSQL is not."""
    for table in (
        *("compatibility", "metrics", "metric_files", "events", "journals", "checkpoint_edges"),
        *("checkpoint_files", "checkpoints", "launches", "attempt_nodes", "attempts", "runs"),
    ):
        op.drop_table(table)
    if _is_postgresql():
        op.execute("DROP FUNCTION holdfast_no_circle()")


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _must(
    kind: sa.types.TypeEngine[Any], *names: str, default: str | None = None
) -> list[sa.Column[Any]]:
    return [
        sa.Column(name, kind, nullable=False, autoincrement=False, server_default=default)
        for name in names
    ]


def _may(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names]


def _one_of(table: str, column: str, words: tuple[str, ...]) -> sa.CheckConstraint:
    listing = ", ".join(f"'{word}'" for word in words)
    return sa.CheckConstraint(f"{column} IN ({listing})", name=op.f(f"ck_{table}_{column}"))


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=op.f(f"pk_{table}"))


def _within(table: str, parent: str, **columns: str) -> sa.ForeignKeyConstraint:
    """A key into `parent`, whose rows take those of `table` with them."""
    return sa.ForeignKeyConstraint(
        list(columns),
        [f"{parent}.{name}" for name in columns.values()],
        name=op.f(f"fk_{table}_{'_'.join(columns)}_{parent}"),
        ondelete="CASCADE",
    )


def _index(table: str, *columns: str, **options: Any) -> None:
    op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, list(columns), **options)


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
        *_must(REAL, "updated_at"),
        *_may(REAL, "committed_at"),
        *_must(DOCUMENT, "goodput"),
        *_must(TEXT, "fingerprint"),
        *_must(TEXT, "root_id", default=""),
        *_must(DOCUMENT, "unknown_kinds", default="[]"),
        *_may(NUMBER, "world_size"),
        *_must(NUMBER, *COUNTS, default="0"),
        _one_of("runs", "state", RUN_STATES),
        _key("runs", "uid"),
    )
    _index("runs", "created_at", "uid")
    _index("runs", "updated_at", "uid")
    _index("runs", "name", "uid")
    _index("runs", "run", "created_at")
    _index("runs", "state", "created_at", "uid")
    # A path may be too long for a B-tree index of PostgreSQL.
    _index("runs", "root", postgresql_using="hash")


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
        *_may(TEXT, *DIGESTS),
        _one_of("attempts", "state", ATTEMPT_STATES),
        _one_of("attempts", "cause", CAUSES),
        _within("attempts", "runs", run_uid="uid"),
        _key("attempts", "run_uid", "number"),
    )
    _index("attempts", "job_id")


def _create_parts_of_attempts() -> None:
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
        _within("launches", "attempts", run_uid="run_uid", attempt="number"),
        _key("launches", "run_uid", "attempt", "number"),
    )
    op.create_table(
        "attempt_nodes",
        *_must(TEXT, "run_uid"),
        *_must(sa.Integer(), "attempt"),
        *_must(TEXT, "host"),
        *_may(TEXT, "fault"),
        *_may(REAL, "started_at", "ended_at"),
        _one_of("attempt_nodes", "fault", CAUSES),
        _within("attempt_nodes", "attempts", run_uid="run_uid", attempt="number"),
        _key("attempt_nodes", "run_uid", "attempt", "host"),
    )
    _index("attempt_nodes", "host", "fault", "started_at")


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
        *_may(NUMBER, "parent_step"),
        *_may(NUMBER, "bytes", "files"),
        *_may(TEXT, "checksum", "command_digest"),
        *_may(REAL, "blocked_s", "flush_s", "staged_at", "committed_at"),
        *_must(DOCUMENT, "metrics", "versions", "topology"),
        *_must(sa.Boolean(), "pinned", "rolled_back"),
        *_may(TEXT, "pinned_by", "pin_note", "deleted_reason", "deleted_by"),
        *_may(REAL, "pinned_at", "deleted_at"),
        *_must(TEXT, "stamp"),
        _one_of("checkpoints", "state", CHECKPOINT_STATES),
        sa.CheckConstraint("step >= 0", name=op.f("ck_checkpoints_step")),
        sa.CheckConstraint("bytes >= 0", name=op.f("ck_checkpoints_bytes")),
        sa.CheckConstraint(PARENT_IS_EARLIER, name=op.f("ck_checkpoints_parent")),
        _within("checkpoints", "runs", run_uid="uid"),
        _key("checkpoints", "run_uid", "name"),
    )
    _index("checkpoints", "run_uid", "step", "attempt", "launch", unique=True)
    _index("checkpoints", "run_uid", "state", "step", "attempt", "launch")
    _index("checkpoints", "parent_uid", "parent_name")


def _create_parts_of_checkpoints() -> None:
    op.create_table(
        "checkpoint_files",
        *_must(TEXT, "run_uid", "checkpoint"),
        *_must(sa.Integer(), "number"),
        *_must(TEXT, "path"),
        *_must(NUMBER, "bytes"),
        *_must(TEXT, "checksum"),
        _within("checkpoint_files", "checkpoints", run_uid="run_uid", checkpoint="name"),
        _key("checkpoint_files", "run_uid", "checkpoint", "number"),
    )
    op.create_table(
        "checkpoint_edges",
        *_must(TEXT, "id", "run_uid", "kind", "source_uid", "source_run", "source"),
        *_may(TEXT, "target_uid", "target_run"),
        *_must(TEXT, "target"),
        _one_of("checkpoint_edges", "kind", EDGE_KINDS),
        _within("checkpoint_edges", "runs", run_uid="uid"),
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
        _within("journals", "runs", run_uid="uid"),
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
        _within("events", "journals", run_uid="run_uid", journal="journal"),
        _key("events", "run_uid", "journal", "opening", "sequence"),
    )
    _index("events", "run_uid", "time", "journal", "opening", "sequence")
    _index("events", "run_uid", "kind", "time")


def _create_metrics() -> None:
    op.create_table(
        "metric_files",
        *_must(TEXT, "run_uid"),
        *_must(NUMBER, "attempt", "launch", "offset", "stride"),
        *_must(DOCUMENT, "spark"),
        _within("metric_files", "runs", run_uid="uid"),
        _key("metric_files", "run_uid", "attempt", "launch"),
    )
    op.create_table(
        "metrics",
        *_must(TEXT, "run_uid"),
        *_must(NUMBER, "attempt", "launch", "bucket", "step"),
        *_must(REAL, "time"),
        *_must(DOCUMENT, "data"),
        _within("metrics", "metric_files", run_uid="run_uid", attempt="attempt", launch="launch"),
        _key("metrics", "run_uid", "attempt", "launch", "bucket"),
    )


def _create_guard() -> None:
    """Refuse cycles of checkpoints with equal steps, which no row shows alone."""
    if _is_postgresql():
        op.execute(
            "CREATE FUNCTION holdfast_no_circle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF EXISTS ({WALK}) THEN RAISE EXCEPTION '{MESSAGE}' "
            "USING ERRCODE = 'check_violation'; END IF; RETURN NEW; END $$"
        )
        op.execute(
            "CREATE TRIGGER checkpoints_no_circle AFTER INSERT OR UPDATE ON checkpoints "
            "FOR EACH ROW WHEN (NEW.parent_step = NEW.step) EXECUTE FUNCTION holdfast_no_circle()"
        )
        return
    for action in ("INSERT", "UPDATE"):
        op.execute(
            f"CREATE TRIGGER checkpoints_no_circle_{action.lower()} AFTER {action} ON checkpoints "
            f"WHEN NEW.parent_step = NEW.step AND EXISTS ({WALK}) "
            f"BEGIN SELECT RAISE(ABORT, '{MESSAGE}'); END"
        )
