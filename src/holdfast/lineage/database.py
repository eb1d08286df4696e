"""Opening the database: which one, whether it can be used, and bringing its schema up to date."""

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

from holdfast.contracts.errors import DamagedIndexError, LineageError
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
# Alembic keeps what it works on in module globals, so a process migrates in one thread at a time.
_MIGRATING: Final = threading.Lock()


def database_url() -> str:
    """`$HOLDFAST_DATABASE_URL`, or SQLite in `holdfast.db` under `$HOLDFAST_HOME`."""
    given = os.environ.get(URL_VARIABLE)
    return given or f"sqlite:///{holdfast_home().absolute() / 'holdfast.db'}"


class Database:
    """A database whose schema is this version's; every error of it is a `LineageError`.

    One that `is_damaged` has said so of its file: better not used again.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_damaged = False
        self._look = threading.local()

    @property
    def name(self) -> str:
        """The URL without its password, for people."""
        return self.engine.url.render_as_string(hide_password=True)

    @property
    def is_postgresql(self) -> bool:
        return self.engine.dialect.name == "postgresql"

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection in a transaction that sees one state of the database: its own, or that of
        the look that this thread takes."""
        shared: Connection | None = getattr(self._look, "connection", None)
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
        """All that this thread reads meanwhile is of one state of the database, and comes by one
        transaction: a server is asked as often as there are questions, and not thrice for each.

        Not for whoever waits meanwhile for what others write.
        """
        with self.reading() as connection:
            is_outermost = getattr(self._look, "connection", None) is None
            self._look.connection = connection
            try:
                yield
            finally:
                if is_outermost:
                    self._look.connection = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A connection in a transaction that may write; SQLite lets one in at a time."""
        with self._guarded(), self.engine.connect() as connection:
            connection = connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with _said(self.engine.url):
                yield
        except DamagedIndexError:
            self.is_damaged = True
            raise

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_database(url: str | None = None) -> Database:
    """The database at `url`, or at `database_url()`, ready for ingest and queries.

    A SQLite file is created and its schema brought up to date, and one that is damaged is set
    aside first; the schema of PostgreSQL, which others use too, changes by `holdfast db upgrade`
    alone. A newer schema is used as long as it says that this version may. Raises `LineageError`
    with what to do when the database cannot be reached or its schema cannot be used.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        _prepare_file(parsed)
        try:
            _bring_up_to_date(parsed, url)
        except DamagedIndexError:
            # Any other file is somebody's, and a URL that is wrong.
            if not was_database(Path(parsed.database or "")):
                raise
            replace_damaged(parsed)
            _bring_up_to_date(parsed, url)
    else:
        found = _revision(parsed)
        if found != head_revision() and not _is_compatible(parsed, found):
            raise LineageError(_schema_words(parsed, found))
    return Database(_engine(parsed))


def replace_damaged(url: URL) -> None:
    """Make room for a new SQLite file where SQLite finds the old one damaged; a sound one stays.

    Raises `LineageError` when it cannot be moved.
    """
    aside = quarantine(Path(url.database or ""))
    if aside is not None:
        warnings.warn(
            f"{url.database}: damaged. It was set aside as {aside}, and a new index is made: its "
            "rows come back from disk as runs are looked at, all of a root's at once by "
            "`holdfast reindex ROOT`",
            stacklevel=2,
        )


def upgrade(url: str | None = None, revision: str = "head") -> str:
    """Bring the schema to `revision`; returns the one it has then. Safe to run twice at once."""
    _migrate(url, command.upgrade, revision)
    return current_revision(url) or ""


def downgrade(url: str | None, revision: str) -> str | None:
    """Take the schema back to `revision` (`base` for none); returns the one it has then."""
    _migrate(url, command.downgrade, revision)
    return current_revision(url)


def current_revision(url: str | None = None) -> str | None:
    """The schema's revision, or None when there is no schema yet."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return None
    return _revision(parsed)


def head_revision() -> str:
    """The revision that this version of Holdfast works with."""
    return ScriptDirectory(str(MIGRATIONS)).get_current_head() or ""


@contextlib.contextmanager
def connect_for_migration(url: str | None = None) -> Iterator[Connection]:
    """A connection that is fit to change the schema.

    Foreign keys are not enforced on it: SQLite alters a table by copying it and dropping the
    old one, and the drop would take every referring row along.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        _prepare_file(parsed)
    engine = _engine(parsed, foreign_keys=False, poolclass=NullPool)
    try:
        with _said(parsed), engine.connect() as connection:
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
            f"{URL_VARIABLE}: not a database URL; expected sqlite:////path/to/file or "
            "postgresql://user@host/database"
        ) from error
    if backend == "postgres":
        parsed, backend = parsed.set(drivername="postgresql"), "postgresql"
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed
    raise LineageError(
        f"{parsed.render_as_string(hide_password=True)}: expected sqlite:////path/to/file or "
        f"postgresql://user@host/database in {URL_VARIABLE}"
    )


def _prepare_file(url: URL) -> None:
    """Make room for a SQLite file; refuse one that several hosts would write."""
    path = Path(url.database or "").absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LineageError(
            f"{path.parent}: cannot be created ({error.strerror}); set HOLDFAST_HOME to a folder "
            f"of yours on a local disk, or {URL_VARIABLE} to a PostgreSQL server"
        ) from error
    mounted = filesystem_of(path)
    if mounted.is_network:
        # SQLite's locks and its shared memory do not hold between the hosts of one.
        raise LineageError(
            f"{path} lies on a network file system ({mounted.kind}), where SQLite's locks do not "
            "hold and the file can be ruined; set HOLDFAST_HOME to a folder on a local disk, or "
            f"{URL_VARIABLE} to a PostgreSQL server (postgresql://user@host/holdfast)"
        )


def _create_private(path: Path) -> None:
    """Create a SQLite file that its owner alone reads; its log and shared memory follow it.

    It holds the specs and journals of every run. One that exists keeps its permissions.
    """
    # Whatever else is wrong with the place, SQLite says it.
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
            f"{url.drivername}: its driver is not installed ({error}); "
            "install holdfast[server], which brings it"
        ) from error


def _tune_sqlite(engine: Engine, *, foreign_keys: bool) -> None:
    """Write-ahead log, foreign keys, and transactions that begin when we say so."""

    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, _record: object) -> None:
        # The driver would begin transactions by its own lights, and too late for DDL.
        connection.isolation_level = None
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        connection.execute("PRAGMA synchronous=NORMAL")
        _use_wal(connection)

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES)
        # A writer takes the lock at once: one that read first could not wait for another.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to its write-ahead log; the switch itself does not wait for locks."""
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
    """True for a newer schema that says that programs of this revision can read and write it."""
    head = head_revision()
    known = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if found is None or found in known:
        return False
    engine = _engine(url, poolclass=NullPool)
    try:
        with _said(url), engine.connect() as connection:
            if not inspect(connection).has_table(models.Compatibility.__tablename__):
                return False
            oldest = connection.scalar(select(models.Compatibility.oldest))
    finally:
        engine.dispose()
    # Revisions are numbers of four digits.
    return oldest is not None and str(oldest) <= head


def _revision(url: URL) -> str | None:
    engine = _engine(url, poolclass=NullPool)
    try:
        with _said(url), engine.connect() as connection:
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
                f"{parsed.render_as_string(hide_password=True)}: {error}. The database may be of "
                f"a newer Holdfast than this one, whose revision is {head_revision()}; "
                "upgrade Holdfast, or name a revision that it knows"
            ) from error
        connection.commit()


def _schema_words(url: URL, found: str | None) -> str:
    name = url.render_as_string(hide_password=True)
    if found is None:
        return f"{name}: no Holdfast schema yet; run `holdfast db upgrade`"
    known = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if found not in known:
        return (
            f"{name}: its schema is revision {found}, which is newer than this Holdfast "
            f"({head_revision()}); upgrade Holdfast here"
        )
    return (
        f"{name}: its schema is revision {found}, this Holdfast needs {head_revision()}; "
        "run `holdfast db upgrade`"
    )


@contextlib.contextmanager
def _said(url: URL) -> Iterator[None]:
    """Turn an error of the database into one that says what to do."""
    try:
        yield
    except SQLAlchemyError as error:
        name = url.render_as_string(hide_password=True)
        words = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        advice = (
            "see that the server runs and the URL is right"
            if url.get_backend_name() == "postgresql"
            else "see that the file is a database and can be written; it is an index only: move "
            "it away and run `holdfast reindex ROOT` to build a new one"
        )
        kind = DamagedIndexError if says_damage(getattr(error, "orig", None)) else LineageError
        raise kind(f"{name}: {words}; {advice} ({URL_VARIABLE})") from error
