"""How Alembic reaches the database: over a connection it is handed, or one that it opens itself."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from holdfast.lineage.database import connect_for_migration
from holdfast.lineage.models import Base

# Any number serves, as long as every process takes the same one.
MIGRATION_LOCK = 4_846_424_601


def migrate(connection: Connection) -> None:
    """Run the migrations that were asked for, one process at a time, all of them or none."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        # SQLite alters a table by copying it; its DDL is transactional once we say BEGIN.
        render_as_batch=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("--sql is not offered: a migration reads the schema that it changes")
given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    with connect_for_migration() as opened:
        migrate(opened)
