"""Opening the database: its transactions, and upgrades of its schema."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, NullPool, inspect, select

from holdfast.contracts.errors import DamagedIndexError, LineageError, QueryError
from holdfast.lineage import models
from holdfast.lineage.engine import WRITES, make_engine, parse_url, prepare_file, translate_errors
from holdfast.lineage.heal import quarantine, was_database

MIGRATIONS: Final = Path(__file__).parent / "migrations"
# Alembic keeps its state in module globals, so only one thread of a process may migrate at a time.
_MIGRATING: Final = threading.Lock()


class Database:
    """An open database with a compatible schema. Its errors are raised as `LineageError`.

    `is_damaged` is set once SQLite reports a damaged file. Do not use the object after that.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_damaged = False
        self._shared = threading.local()

    @property
    def name(self) -> str:
        """The URL without its password, for messages."""
        return self.engine.url.render_as_string(hide_password=True)

    @property
    def is_postgresql(self) -> bool:
        return self.engine.dialect.name == "postgresql"

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection in a transaction that sees one state of the database.

        Inside `consistent_read`, this is the connection of that read.
        """
        shared: Connection | None = getattr(self._shared, "connection", None)
        if shared is not None:
            with self._guarded():
                yield shared
            return
        with self._guarded(), self.engine.connect() as connection:
            level = "REPEATABLE READ" if self.is_postgresql else None
            if level:
                connection = connection.execution_options(isolation_level=level)
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def consistent_read(self) -> Iterator[None]:
        """Run all reads of this thread in one transaction, which sees one state of the database.

        This also saves round trips: the transaction begins and ends once, not once per query.
        Do not wait for the writes of others inside it, because it does not see them.
        """
        with self.reading() as connection:
            is_outermost = getattr(self._shared, "connection", None) is None
            self._shared.connection = connection
            try:
                yield
            finally:
                if is_outermost:
                    self._shared.connection = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """Yield a connection in a transaction that may write. SQLite allows one at a time."""
        with self._guarded(), self.engine.connect() as connection:
            connection = connection.execution_options(**{WRITES: True})
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with translate_errors(self.engine.url):
                yield
        except DamagedIndexError:
            self.is_damaged = True
            raise

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_database(url: str | None = None) -> Database:
    """Open the database at `url`, by default at `engine.database_url()`, for ingest and queries.

    A SQLite file is created if needed and its schema is upgraded. A damaged file is moved away
    first. The schema of PostgreSQL, which is shared, changes only by `holdfast db upgrade`. A
    newer schema is used if it declares itself compatible with this version. Raises `LineageError`
    if the database cannot be reached or its schema cannot be used.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        _make_usable(parsed, url)
    else:
        found = _revision(parsed)
        if found != head_revision() and not _is_compatible(parsed, found):
            raise LineageError(_schema_problem(parsed, found))
    return Database(make_engine(parsed))


def _make_usable(parsed: URL, url: str | None) -> None:
    """Create a SQLite file or upgrade its schema, after a damaged one is moved away."""
    prepare_file(parsed)
    try:
        _bring_up_to_date(parsed, url)
    except DamagedIndexError:
        # Any other file is not an index: the URL is wrong, and the file must stay.
        if not was_database(Path(parsed.database or "")):
            raise
        replace_damaged(parsed)
        _bring_up_to_date(parsed, url)


def replace_damaged(url: URL) -> None:
    """Move a damaged SQLite file away, so that a new one can be created. A sound file stays.

    Raises `LineageError` if the file cannot be moved.
    """
    aside = quarantine(Path(url.database or ""))
    if aside is not None:
        warnings.warn(
            f"{url.database}: the index was damaged. It was moved to {aside} and a new one is "
            "created. The rows of a run are rebuilt from disk when the run is next read; "
            "`holdfast reindex ROOT` rebuilds those of all runs in a root",
            stacklevel=2,
        )


def upgrade(url: str | None = None, revision: str = "head") -> str:
    """Upgrade the schema to `revision` and return the new revision. Safe to run concurrently."""
    _migrate(url, command.upgrade, revision)
    return current_revision(url) or ""


def downgrade(url: str | None, revision: str) -> str | None:
    """Downgrade the schema to `revision` (`base` drops it) and return the new revision.

    Raises `QueryError` for an unknown revision.
    """
    known = _known_revisions()
    if revision not in {"base", *known} and not revision.startswith("-"):
        raise QueryError(
            f"{revision!r}: not a revision of the schema. Expected one of {', '.join(known)}, or "
            "base"
        )
    _migrate(url, command.downgrade, revision)
    return current_revision(url)


def current_revision(url: str | None = None) -> str | None:
    """Return the schema's revision, or None if there is no schema yet."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return None
    return _revision(parsed)


def schema_problem(url: str | None = None) -> str | None:
    """Return why this version cannot use the schema, with the next step; None if it can."""
    parsed, found = parse_url(url), current_revision(url)
    if found == head_revision() or (found is not None and _is_compatible(parsed, found)):
        return None
    return _schema_problem(parsed, found)


def head_revision() -> str:
    """Return the schema revision of this version of Holdfast."""
    return ScriptDirectory(str(MIGRATIONS)).get_current_head() or ""


def _known_revisions() -> list[str]:
    return [script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]


@contextlib.contextmanager
def connect_for_migration(url: str | None = None) -> Iterator[Connection]:
    """Yield a connection for schema changes.

    It does not enforce foreign keys. SQLite alters a table by copying it and dropping the old
    one, and with foreign keys the drop would delete every referring row.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        prepare_file(parsed)
    engine = make_engine(parsed, foreign_keys=False, poolclass=NullPool)
    try:
        with translate_errors(parsed), engine.connect() as connection:
            yield connection.execution_options(**{WRITES: True})
    finally:
        engine.dispose()


def _bring_up_to_date(parsed: URL, url: str | None) -> None:
    found = _revision(parsed)
    if found != head_revision() and not _is_compatible(parsed, found):
        upgrade(url)


def _is_compatible(url: URL, found: str | None) -> bool:
    """Return True for a newer schema that programs of this revision may still read and write."""
    head = head_revision()
    if found is None or found in _known_revisions():
        return False
    engine = make_engine(url, poolclass=NullPool)
    try:
        with translate_errors(url), engine.connect() as connection:
            if not inspect(connection).has_table(models.Compatibility.__tablename__):
                return False
            oldest = connection.scalar(select(models.Compatibility.oldest))
    finally:
        engine.dispose()
    # Revisions are four-digit numbers, so they compare as text.
    return oldest is not None and str(oldest) <= head


def _revision(url: URL) -> str | None:
    engine = make_engine(url, poolclass=NullPool)
    try:
        with translate_errors(url), engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


def _migrate(url: str | None, act: Any, revision: str) -> None:
    parsed = parse_url(url)
    found = current_revision(url)
    if found is not None and found not in _known_revisions():
        raise LineageError(_schema_problem(parsed, found))
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _MIGRATING, connect_for_migration(url) as connection:
        config.attributes["connection"] = connection
        try:
            act(config, revision)
        except CommandError as error:
            raise LineageError(f"{parsed.render_as_string(hide_password=True)}: {error}") from error
        connection.commit()


def _schema_problem(url: URL, found: str | None) -> str:
    name = url.render_as_string(hide_password=True)
    if found is None:
        return f"{name}: the database has no Holdfast schema yet; run `holdfast db upgrade`"
    if found not in _known_revisions():
        return (
            f"{name}: the schema has revision {found}, which is newer than this Holdfast "
            f"({head_revision()}); upgrade Holdfast on this machine, or move the database away and "
            "run `holdfast reindex`, which fills a new one from the runs"
        )
    return (
        f"{name}: the schema has revision {found}, but this Holdfast needs {head_revision()}; "
        "run `holdfast db upgrade`"
    )
