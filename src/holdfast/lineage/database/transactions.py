"""Opening the database, and its transactions."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import URL, Connection, Engine

from holdfast.contracts.errors import DamagedIndexError, LineageError
from holdfast.lineage.database import engine, heal, schema, sqlite_file
from holdfast.lineage.database.limits import ORDINARY, DatabaseLimits


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
            connection = connection.execution_options(**{engine.WRITES: True})
            with connection.begin():
                if self.is_postgresql:
                    from holdfast.lineage.database.postgres import allow_long_statements

                    allow_long_statements(connection)
                yield connection

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with engine.translate_errors(self.engine.url):
                yield
        except DamagedIndexError:
            self.is_damaged = True
            raise

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_database(url: str | None = None, limits: DatabaseLimits = ORDINARY) -> Database:
    """Open the database at `url`, by default `database_url()`, for ingest and queries.

    `limits` bound each use of it.

    A SQLite file is created if needed and its schema is upgraded. A damaged file is moved away
    first. The schema of PostgreSQL, which is shared, changes only by `holdfast db upgrade`. A
    newer schema is used if it declares itself compatible with this version. Raises `LineageError`
    if the database cannot be reached or its schema cannot be used.
    """
    parsed = engine.parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        _make_usable(parsed, url)
    else:
        problem = schema.problem_of(parsed, schema.revision_of(parsed))
        if problem:
            raise LineageError(problem)
    return Database(engine.make_engine(parsed, limits))


def _make_usable(parsed: URL, url: str | None) -> None:
    """Create a SQLite file or upgrade its schema, after a damaged one is moved away."""
    sqlite_file.prepare_file(Path(parsed.database or "").absolute())
    try:
        _bring_up_to_date(parsed, url)
    except DamagedIndexError:
        # Any other file is not an index: the URL is wrong, and the file must stay.
        if not heal.was_database(Path(parsed.database or "")):
            raise
        replace_damaged(parsed)
        _bring_up_to_date(parsed, url)


def replace_damaged(url: URL) -> None:
    """Move a damaged SQLite file away, so that a new one can be created. A sound file stays.

    Raises `LineageError` if the file cannot be moved.
    """
    aside = heal.quarantine(Path(url.database or ""))
    if aside is not None:
        warnings.warn(
            f"{url.database}: the index was damaged. It was moved to {aside} and a new one is "
            "created. The rows of a run are rebuilt from disk when the run is next read; "
            "`holdfast reindex ROOT` rebuilds those of all runs in a root",
            stacklevel=2,
        )


def _bring_up_to_date(parsed: URL, url: str | None) -> None:
    if schema.problem_of(parsed, schema.revision_of(parsed)):
        # Alembic takes a third of a second and 12 MB to import, and is hardly ever needed.
        from holdfast.lineage.database.schema_changes import upgrade

        upgrade(url)
