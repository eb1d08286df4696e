"""Upgrades and downgrades of a database's schema, by Alembic."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, NullPool

from holdfast.contracts.errors import LineageError, QueryError
from holdfast.lineage.database import limits, schema, sqlite_file
from holdfast.lineage.database.engine import (
    WRITES,
    make_engine,
    parse_url,
    translate_errors,
)

# Alembic keeps its state in module globals, so only one thread of a process may migrate at a time.
_MIGRATING: Final = threading.Lock()


def upgrade(url: str | None = None, revision: str = "head") -> str:
    """Upgrade the schema to `revision` and return the new revision. Safe to run concurrently."""
    _migrate(url, command.upgrade, revision)
    return schema.current_revision(url) or ""


def downgrade(url: str | None, revision: str) -> str | None:
    """Downgrade the schema to `revision` (`base` drops it) and return the new revision.

    Raises `QueryError` for an unknown revision.
    """
    known = sqlite_file.known_revisions()
    if revision not in {"base", *known} and not revision.startswith("-"):
        raise QueryError(
            f"{revision!r}: not a revision of the schema. Expected one of {', '.join(known)}, or "
            "base"
        )
    _migrate(url, command.downgrade, revision)
    return schema.current_revision(url)


@contextlib.contextmanager
def connect_for_migration(url: str | None = None) -> Iterator[Connection]:
    """Yield a connection for schema changes.

    It does not enforce foreign keys. SQLite alters a table by copying it and dropping the old
    one, and with foreign keys the drop would delete every referring row.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        sqlite_file.prepare_file(Path(parsed.database or "").absolute())
    engine = make_engine(parsed, limits.MIGRATIONS, foreign_keys=False, poolclass=NullPool)
    try:
        with translate_errors(parsed), engine.connect() as connection:
            yield connection.execution_options(**{WRITES: True})
    finally:
        engine.dispose()


def _migrate(url: str | None, act: Any, revision: str) -> None:
    parsed = parse_url(url)
    found = schema.current_revision(url)
    if found is not None and found not in sqlite_file.known_revisions():
        raise LineageError(schema.newer_schema(parsed, found))
    config = Config()
    config.set_main_option("script_location", str(sqlite_file.MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _MIGRATING, connect_for_migration(url) as connection:
        config.attributes["connection"] = connection
        try:
            act(config, revision)
        except CommandError as error:
            raise LineageError(f"{parsed.render_as_string(hide_password=True)}: {error}") from error
        connection.commit()
