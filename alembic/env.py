"""Alembic's environment. It uses the connection it is given, or opens one itself."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from holdfast.lineage.database.schema_changes import connect_for_migration
from holdfast.lineage.database.tables import METADATA

# An arbitrary number that is the same for all processes.
MIGRATION_LOCK = 4_846_424_601


def migrate(connection: Connection) -> None:
    """Run the requested migrations in one transaction, one process at a time."""
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        # SQLite alters a table by copying it. Its DDL is transactional after an explicit BEGIN.
        render_as_batch=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("--sql is not supported, because the migrations read the existing schema")
given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    with connect_for_migration() as opened:
        migrate(opened)
