"""Adds digests and nodes of attempts, checkpoint files, metrics and pins; prevents cycles.

Existing rows are kept. The new columns of existing runs are filled at their next ingest: this
migration clears the fingerprints and stamps, so every folder is read again.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

CAUSES = (
    *("preemption", "time_limit", "node_failure", "hang", "host_oom", "gpu_oom", "storage_full"),
    *("numerics", "user_error", "infrastructure", "operator", "unknown"),
)
EDGE_KINDS = ("resumed_from", "forked_from", "rolled_back", "exported_to")
FORMER_EDGE_KINDS = ("parent", *EDGE_KINDS)
PARENT_IS_EARLIER = (
    "parent_uid IS NULL OR (parent_name IS NOT NULL AND parent_step IS NOT NULL "
    "AND (parent_step < step OR (parent_step = step AND (parent_uid <> run_uid "
    "OR length(parent_name) < length(name) "
    "OR (length(parent_name) = length(name) AND parent_name < name)))))"
)
DIGESTS = ("code_commit", "code_digest", "config_digest", "data_digest", "environment_digest")
INDEXES: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("runs", ("created_at", "uid"), {}),
    ("runs", ("updated_at", "uid"), {}),
    ("runs", ("name", "uid"), {}),
    ("runs", ("state", "created_at", "uid"), {}),
    ("runs", ("root",), {"postgresql_using": "hash"}),
    ("checkpoints", ("run_uid", "step", "attempt", "launch"), {"unique": True}),
    ("checkpoints", ("run_uid", "state", "step", "attempt", "launch"), {}),
    ("events", ("run_uid", "time", "journal", "opening", "sequence"), {}),
    ("events", ("run_uid", "kind", "time"), {}),
)
FORMER_INDEXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("runs", ("created_at",)),
    ("runs", ("name", "created_at")),
    ("runs", ("state",)),
    ("checkpoints", ("run_uid", "step")),
    ("events", ("run_uid", "time")),
    ("events", ("time",)),
)

TEXT = sa.Text()
NUMBER = sa.BigInteger()
REAL: sa.Double[float] = sa.Double()
DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Upgrade the schema from the previous revision."""
    for table, columns in FORMER_INDEXES:
        op.drop_index(_index_name(table, columns), table)
    _widen_runs()
    _widen_attempts()
    _widen_checkpoints()
    _narrow_edges()
    for table, columns, options in INDEXES:
        op.create_index(_index_name(table, columns), table, list(columns), **options)
    _create_nodes()
    _create_files()
    _create_metrics()
    _create_guard()


def downgrade() -> None:
    """Revert `upgrade`. The next ingest restores the edges to parents."""
    _drop_guard()
    for table in ("metrics", "metric_files", "checkpoint_files", "attempt_nodes"):
        op.drop_table(table)
    for table, columns, _ in INDEXES:
        op.drop_index(_index_name(table, columns), table)
    with op.batch_alter_table("checkpoint_edges") as batch:
        batch.drop_constraint(op.f("ck_checkpoint_edges_kind"), type_="check")
        batch.create_check_constraint(
            op.f("ck_checkpoint_edges_kind"), f"kind IN ({_listing(FORMER_EDGE_KINDS)})"
        )
    with op.batch_alter_table("checkpoints") as batch:
        batch.drop_constraint(op.f("ck_checkpoints_parent"), type_="check")
        for name in ("parent_step", "versions", "topology", "pinned_by", "pinned_at", "pin_note"):
            batch.drop_column(name)
    for name in DIGESTS:
        op.drop_column("attempts", name)
    for name in ("updated_at", "committed_at", "goodput"):
        op.drop_column("runs", name)
    for table, columns in FORMER_INDEXES:
        op.create_index(_index_name(table, columns), table, list(columns))
    op.execute("UPDATE runs SET fingerprint = ''")


def _index_name(table: str, columns: tuple[str, ...]) -> str:
    return op.f(f"ix_{table}_{'_'.join(columns)}")


def _listing(words: tuple[str, ...]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _add(table: str, kind: sa.types.TypeEngine[Any], *names: str, **options: Any) -> None:
    for name in names:
        op.add_column(table, sa.Column(name, kind, **options))


def _widen_runs() -> None:
    """Add `updated_at`, `committed_at` and `goodput` to the runs."""
    _add("runs", REAL, "updated_at", nullable=False, server_default="0")
    _add("runs", REAL, "committed_at")
    _add("runs", DOCUMENT, "goodput", nullable=False, server_default="{}")
    op.execute(
        "UPDATE runs SET fingerprint = '', updated_at = coalesce((SELECT max(time) FROM events "
        "WHERE events.run_uid = runs.uid), ended_at, created_at), committed_at = (SELECT "
        "max(committed_at) FROM checkpoints WHERE checkpoints.run_uid = runs.uid)"
    )
    with op.batch_alter_table("runs") as batch:
        for name, kind in (("updated_at", REAL), ("goodput", DOCUMENT)):
            batch.alter_column(name, existing_type=kind, server_default=None)


def _widen_attempts() -> None:
    _add("attempts", TEXT, *DIGESTS)


def _widen_checkpoints() -> None:
    """Clear the references to parents that cannot be ancestors. The column `parent` stays."""
    _add("checkpoints", NUMBER, "parent_step")
    _add("checkpoints", DOCUMENT, "versions", "topology", nullable=False, server_default="{}")
    _add("checkpoints", TEXT, "pinned_by", "pin_note")
    _add("checkpoints", REAL, "pinned_at")
    # Names are like `step-00000100.a0001.l01`. SQLite's cast stops at the first non-digit.
    digits = "split_part(substr(parent_name, 6), '.', 1)" if _is_postgresql() else None
    step = f"CAST({digits or 'substr(parent_name, 6)'} AS BIGINT)"
    op.execute(
        f"UPDATE checkpoints SET stamp = '', parent_step = {step} WHERE parent_name LIKE 'step-%'"
    )
    op.execute("UPDATE checkpoints SET stamp = ''")
    op.execute(
        "UPDATE checkpoints SET parent_uid = NULL, parent_name = NULL, parent_step = NULL "
        f"WHERE parent_step IS NULL OR NOT ({PARENT_IS_EARLIER})"
    )
    with op.batch_alter_table("checkpoints") as batch:
        for name in ("versions", "topology"):
            batch.alter_column(name, existing_type=DOCUMENT, server_default=None)
        batch.create_check_constraint(op.f("ck_checkpoints_parent"), PARENT_IS_EARLIER)


def _narrow_edges() -> None:
    """Delete the edges to parents. Checkpoints have them too, and they were half of the rows."""
    op.execute("DELETE FROM checkpoint_edges WHERE kind = 'parent'")
    with op.batch_alter_table("checkpoint_edges") as batch:
        batch.drop_constraint(op.f("ck_checkpoint_edges_kind"), type_="check")
        batch.create_check_constraint(
            op.f("ck_checkpoint_edges_kind"), f"kind IN ({_listing(EDGE_KINDS)})"
        )


def _create_nodes() -> None:
    op.create_table(
        "attempt_nodes",
        sa.Column("run_uid", TEXT, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("host", TEXT, nullable=False),
        sa.Column("fault", TEXT),
        sa.Column("started_at", REAL),
        sa.Column("ended_at", REAL),
        sa.CheckConstraint(f"fault IN ({_listing(CAUSES)})", name=op.f("ck_attempt_nodes_fault")),
        sa.ForeignKeyConstraint(
            ["run_uid", "attempt"],
            ["attempts.run_uid", "attempts.number"],
            name=op.f("fk_attempt_nodes_run_uid_attempt_attempts"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_uid", "attempt", "host", name=op.f("pk_attempt_nodes")),
    )
    columns = ("host", "fault", "started_at")
    op.create_index(_index_name("attempt_nodes", columns), "attempt_nodes", list(columns))


def _create_files() -> None:
    op.create_table(
        "checkpoint_files",
        sa.Column("run_uid", TEXT, nullable=False),
        sa.Column("checkpoint", TEXT, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("path", TEXT, nullable=False),
        sa.Column("bytes", NUMBER, nullable=False),
        sa.Column("checksum", TEXT, nullable=False),
        sa.ForeignKeyConstraint(
            ["run_uid", "checkpoint"],
            ["checkpoints.run_uid", "checkpoints.name"],
            name=op.f("fk_checkpoint_files_run_uid_checkpoint_checkpoints"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "run_uid", "checkpoint", "number", name=op.f("pk_checkpoint_files")
        ),
    )


def _create_metrics() -> None:
    key = ("run_uid", "attempt", "launch")
    op.create_table(
        "metric_files",
        sa.Column("run_uid", TEXT, nullable=False),
        *(sa.Column(name, NUMBER, nullable=False, autoincrement=False) for name in key[1:]),
        *(sa.Column(name, NUMBER, nullable=False) for name in ("offset", "stride")),
        sa.Column("spark", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(
            ["run_uid"],
            ["runs.uid"],
            name=op.f("fk_metric_files_run_uid_runs"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(*key, name=op.f("pk_metric_files")),
    )
    op.create_table(
        "metrics",
        sa.Column("run_uid", TEXT, nullable=False),
        *(
            sa.Column(name, NUMBER, nullable=False, autoincrement=False)
            for name in (*key[1:], "bucket")
        ),
        sa.Column("step", NUMBER, nullable=False),
        sa.Column("time", REAL, nullable=False),
        sa.Column("data", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(
            list(key),
            [f"metric_files.{name}" for name in key],
            name=op.f("fk_metrics_run_uid_attempt_launch_metric_files"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(*key, "bucket", name=op.f("pk_metrics")),
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


def _create_guard() -> None:
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


def _drop_guard() -> None:
    if _is_postgresql():
        op.execute("DROP TRIGGER checkpoints_no_circle ON checkpoints")
        op.execute("DROP FUNCTION holdfast_no_circle()")
        return
    for action in ("insert", "update"):
        op.execute(f"DROP TRIGGER checkpoints_no_circle_{action}")
