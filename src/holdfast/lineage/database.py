"""Opening the database: its URL, its connections, and upgrades of its schema."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    NullPool,
    create_engine,
    event,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from holdfast.contracts.errors import DamagedIndexError, LineageError, QueryError
from holdfast.contracts.filesystems import filesystem_of
from holdfast.contracts.paths import holdfast_home
from holdfast.lineage import models
from holdfast.lineage.heal import quarantine, says_damage, was_database

URL_VARIABLE: Final = "HOLDFAST_DATABASE_URL"
BUSY_TIMEOUT_S: Final = 60
CONNECT_TIMEOUT_S: Final = 10
WAL_TRIES_MAX: Final = 100
WAL_PAUSE_S: Final = 0.05
MIGRATIONS: Final = Path(__file__).parent / "migrations"
_WRITES: Final = "holdfast_writes"
# Alembic keeps its state in module globals, so only one thread of a process may migrate at a time.
_MIGRATING: Final = threading.Lock()


def database_url() -> str:
    """Return `$HOLDFAST_DATABASE_URL`, by default SQLite in `$HOLDFAST_HOME/holdfast.db`."""
    given = os.environ.get(URL_VARIABLE)
    return given or f"sqlite:///{holdfast_home().absolute() / 'holdfast.db'}"


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
            connection = connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with _translate_errors(self.engine.url):
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
    """Open the database at `url`, by default at `database_url()`, for ingest and queries.

    A SQLite file is created if needed and its schema is upgraded. A damaged file is moved away
    first. The schema of PostgreSQL, which is shared, changes only by `holdfast db upgrade`. A
    newer schema is used if it declares itself compatible with this version. Raises `LineageError`
    if the database cannot be reached or its schema cannot be used.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        _prepare_file(parsed)
        try:
            _bring_up_to_date(parsed, url)
        except DamagedIndexError:
            # Any other file is not an index: the URL is wrong, and the file must stay.
            if not was_database(Path(parsed.database or "")):
                raise
            replace_damaged(parsed)
            _bring_up_to_date(parsed, url)
    else:
        found = _revision(parsed)
        if found != head_revision() and not _is_compatible(parsed, found):
            raise LineageError(_schema_problem(parsed, found))
    return Database(_engine(parsed))


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
    known = [one.revision for one in ScriptDirectory(str(MIGRATIONS)).walk_revisions()]
    if revision not in {"base", *known} and not revision.startswith("-"):
        raise QueryError(
            f"{revision!r}: not a revision of the schema. Expected one of {', '.join(known)}, or "
            "base"
        )
    _migrate(url, command.downgrade, revision)
    return current_revision(url)


def current_revision(url: str | None = None) -> str | None:
    """Return the schema's revision, or None if there is no schema yet."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return None
    return _revision(parsed)


def schema_problem(url: str | None = None) -> str | None:
    """Return why this version cannot use the schema, with the next step; None if it can."""
    parsed, found = _parse(url), current_revision(url)
    if found == head_revision() or (found is not None and _is_compatible(parsed, found)):
        return None
    return _schema_problem(parsed, found)


def head_revision() -> str:
    """Return the schema revision of this version of Holdfast."""
    return ScriptDirectory(str(MIGRATIONS)).get_current_head() or ""


@contextlib.contextmanager
def connect_for_migration(url: str | None = None) -> Iterator[Connection]:
    """Yield a connection for schema changes.

    It does not enforce foreign keys. SQLite alters a table by copying it and dropping the old
    one, and with foreign keys the drop would delete every referring row.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        _prepare_file(parsed)
    engine = _engine(parsed, foreign_keys=False, poolclass=NullPool)
    try:
        with _translate_errors(parsed), engine.connect() as connection:
            yield connection.execution_options(**{_WRITES: True})
    finally:
        engine.dispose()


def _parse(url: str | None) -> URL:
    given = url or database_url()
    try:
        parsed = make_url(given)
        backend = parsed.get_backend_name()
    except ArgumentError as error:
        raise LineageError(
            f"{URL_VARIABLE} is not a database URL; expected sqlite:////path/to/file or "
            "postgresql://user@host/database"
        ) from error
    if backend == "postgres":
        parsed, backend = parsed.set(drivername="postgresql"), "postgresql"
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed
    raise LineageError(
        f"{parsed.render_as_string(hide_password=True)}: this database is not supported; expected "
        f"sqlite:////path/to/file or postgresql://user@host/database in {URL_VARIABLE}"
    )


def _prepare_file(url: URL) -> None:
    """Create the folder of a SQLite file. Raise `LineageError` on a network file system."""
    path = Path(url.database or "").absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LineageError(
            f"{path.parent}: the folder cannot be created ({error.strerror}); set HOLDFAST_HOME to "
            f"a folder of your own on a local disk, or {URL_VARIABLE} to a PostgreSQL server"
        ) from error
    mounted = filesystem_of(path)
    if mounted.is_network:
        # SQLite's locks and shared memory do not work between hosts.
        raise LineageError(
            f"{path} is on a network file system ({mounted.kind}), where SQLite's locks do not "
            "work and the file can be damaged; set HOLDFAST_HOME to a folder on a local disk, or "
            f"{URL_VARIABLE} to a PostgreSQL server (postgresql://user@host/holdfast)"
        )


def _create_private(path: Path) -> None:
    """Create a SQLite file that only its owner can read, unless it exists.

    It contains the specs and journals of all runs. SQLite gives its log and shared memory the
    same permissions.
    """
    # SQLite reports all other problems with the path.
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _engine(url: URL, *, foreign_keys: bool = True, **options: Any) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            _create_private(Path(url.database or ""))
            engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, **options)
            _tune_sqlite(engine, foreign_keys=foreign_keys)
            return engine
        arguments = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_TIMEOUT_S}
        return create_engine(url, connect_args=arguments, pool_pre_ping=True, **options)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise LineageError(
            f"{url.drivername}: the database driver is not installed ({error}); "
            "install holdfast[server], which includes it"
        ) from error


def _tune_sqlite(engine: Engine, *, foreign_keys: bool) -> None:
    """Turn on the write-ahead log, foreign keys and explicit transactions."""

    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, _record: object) -> None:
        # Otherwise the driver begins transactions itself, and too late for DDL.
        connection.isolation_level = None
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        connection.execute("PRAGMA synchronous=NORMAL")
        _use_wal(connection)

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES)
        # A writer takes the lock at once: a transaction that has read first cannot wait for it.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to the write-ahead log. Retry, because the switch does not wait for locks."""
    for attempt in range(WAL_TRIES_MAX):
        if connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
            return
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if attempt == WAL_TRIES_MAX - 1:
                raise
            time.sleep(WAL_PAUSE_S)


def _bring_up_to_date(parsed: URL, url: str | None) -> None:
    found = _revision(parsed)
    if found != head_revision() and not _is_compatible(parsed, found):
        upgrade(url)


def _is_compatible(url: URL, found: str | None) -> bool:
    """Return True for a newer schema that programs of this revision may still read and write."""
    head = head_revision()
    known = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if found is None or found in known:
        return False
    engine = _engine(url, poolclass=NullPool)
    try:
        with _translate_errors(url), engine.connect() as connection:
            if not inspect(connection).has_table(models.Compatibility.__tablename__):
                return False
            oldest = connection.scalar(select(models.Compatibility.oldest))
    finally:
        engine.dispose()
    # Revisions are four-digit numbers, so they compare as text.
    return oldest is not None and str(oldest) <= head


def _revision(url: URL) -> str | None:
    engine = _engine(url, poolclass=NullPool)
    try:
        with _translate_errors(url), engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


def _migrate(url: str | None, act: Any, revision: str) -> None:
    parsed = _parse(url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _MIGRATING, connect_for_migration(url) as connection:
        config.attributes["connection"] = connection
        try:
            act(config, revision)
        except CommandError as error:
            raise LineageError(
                f"{parsed.render_as_string(hide_password=True)}: {error}. The database may belong "
                f"to a newer version of Holdfast; this one has revision {head_revision()}. Upgrade "
                "Holdfast, or name a revision that it knows"
            ) from error
        connection.commit()


def _schema_problem(url: URL, found: str | None) -> str:
    name = url.render_as_string(hide_password=True)
    if found is None:
        return f"{name}: the database has no Holdfast schema yet; run `holdfast db upgrade`"
    known = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if found not in known:
        return (
            f"{name}: the schema has revision {found}, which is newer than this Holdfast "
            f"({head_revision()}); upgrade Holdfast on this machine"
        )
    return (
        f"{name}: the schema has revision {found}, but this Holdfast needs {head_revision()}; "
        "run `holdfast db upgrade`"
    )


@contextlib.contextmanager
def _translate_errors(url: URL) -> Iterator[None]:
    """Translate database errors into `LineageError` with advice."""
    try:
        yield
    except SQLAlchemyError as error:
        name = url.render_as_string(hide_password=True)
        problem = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        advice = (
            "check that the server is running and the URL is correct"
            if url.get_backend_name() == "postgresql"
            else "check that the file is a database and writable; all its data can be rebuilt: "
            "move it away and run `holdfast reindex ROOT`"
        )
        kind = DamagedIndexError if says_damage(getattr(error, "orig", None)) else LineageError
        raise kind(f"{name}: {problem}; {advice} ({URL_VARIABLE})") from error
