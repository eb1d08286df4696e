"""The database's URL, and engines for it: settings of SQLite, limits, and errors with advice."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from holdfast.contracts.disk.paths import absolute_path
from holdfast.contracts.errors import DamagedIndexError, LineageError
from holdfast.lineage.database.documents import parse_json
from holdfast.lineage.database.heal import says_damage
from holdfast.lineage.database.limits import ORDINARY, POOL_S, DatabaseLimits
from holdfast.lineage.database.sqlite_file import URL_VARIABLE, create_private, database_url

WAL_TRIES_MAX: Final = 100
WAL_PAUSE_S: Final = 0.05
# The execution option of a transaction that may write.
WRITES: Final = "holdfast_writes"


def parse_url(url: str | None) -> URL:
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
        path = str(absolute_path(parsed.database, URL_VARIABLE))
        found = parsed.set(database=path)
        if url is None and found != parsed:
            # For the processes that this one starts elsewhere.
            os.environ[URL_VARIABLE] = found.render_as_string(hide_password=False)
        return found
    raise LineageError(
        f"{parsed.render_as_string(hide_password=True)}: this database is not supported; expected "
        f"sqlite:////path/to/file or postgresql://user@host/database in {URL_VARIABLE}"
    )


def make_engine(
    url: URL, limits: DatabaseLimits = ORDINARY, *, foreign_keys: bool = True, **options: Any
) -> Engine:
    """Create an engine whose uses of the database are bounded by `limits`."""
    if "poolclass" not in options:
        options["pool_timeout"] = POOL_S
    options["json_deserializer"] = parse_json
    try:
        if url.get_backend_name() == "sqlite":
            create_private(Path(url.database or ""))
            engine = create_engine(url, connect_args={"timeout": limits.lock_s}, **options)
            _tune_sqlite(engine, foreign_keys=foreign_keys)
            return engine
        # The driver is an optional dependency.
        from holdfast.lineage.database import postgres

        return postgres.make_engine(url, limits, **options)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise LineageError(
            f"{url.drivername}: the database driver is not installed ({error}); "
            "install Holdfast with the extra `server`, which includes it"
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
        writes = connection.get_execution_options().get(WRITES)
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


@contextlib.contextmanager
def translate_errors(url: URL) -> Iterator[None]:
    """Translate database errors into `LineageError` with advice."""
    try:
        yield
    except PoolTimeoutError as error:
        raise LineageError(
            f"{url.render_as_string(hide_password=True)}: all connections of this process are in "
            "use; the server is slow or does not answer. Try again in a moment"
        ) from error
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
