"""Connections to PostgreSQL that fail in a bounded time if the server stops answering.

The kernel of a server that hangs still acknowledges packets, so no TCP setting detects it, and
`statement_timeout` is a timer of the server. Each wait for the server therefore has a limit here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from typing import Any, Final

import psycopg
from sqlalchemy import URL, Engine, create_engine, event

from holdfast.lineage.database.limits import ORDINARY, WRITES, DatabaseLimits

# Per address of the host: `localhost` has two.
CONNECT_S: Final = 4
# For a pooled connection, which is checked before its next use.
PING: Final = DatabaseLimits(silent_s=3.0, statement_s=0, lock_s=0, is_patient=False)
# After the server did not answer, connections are refused for this long.
PAUSE_S: Final = 10.0
# A failed attempt to connect that took longer counts as no answer.
SLOW_S: Final = 2.0
# A client that stopped in a transaction must not block the ingest of a run for ever.
TRANSACTION_IDLE_S: Final = 300

# A peer that has vanished is detected within 11 seconds.
_SETTINGS: Final = {
    "connect_timeout": CONNECT_S,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


class _Server:
    """Whether a server answered lately. While it does not, one thread at a time tries again.

    Otherwise the requests to an API server would fill its threads, each waiting in turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._problem = ""

    def check(self) -> None:
        """Raise `OperationalError` if the server did not answer a moment ago."""
        with self._lock:
            now = time.monotonic()
            if self._problem and now < self._retry_at:
                left_s = self._retry_at - now
                raise psycopg.OperationalError(f"{self._problem} (next attempt in {left_s:.0f} s)")
            self._retry_at = now + PAUSE_S

    def failed(self, problem: str) -> None:
        with self._lock:
            self._retry_at, self._problem = time.monotonic() + PAUSE_S, problem

    def answered(self) -> None:
        with self._lock:
            self._problem = ""


_SERVERS: Final[dict[str, _Server]] = {}


class BoundedConnection(psycopg.Connection[Any]):
    """A connection whose waits for the server are bounded by `limits`."""

    limits: DatabaseLimits = PING
    server: _Server | None = None

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **named: Any) -> Any:
        """Wait for the server, as psycopg does. A server that hangs raises `OperationalError`."""
        return super().wait(self._bounded(gen), *args, **named)

    def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        heard_at = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                # psycopg resumes this several times a second, also without an event.
                ready = yield wanted
                now = time.monotonic()
                if ready:
                    heard_at = now
                elif now - heard_at > self.limits.silent_s:
                    if not (self.limits.is_patient and self._is_at_work()):
                        self._give_up(now - heard_at)
                    heard_at = time.monotonic()
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value

    def _give_up(self, silent_s: float) -> None:
        problem = f"the server did not answer for {silent_s:.0f} s"
        # If only an idle connection was lost, a new one works.
        if self.server is not None and self.limits is not PING:
            self.server.failed(problem)
        self.pgconn.finish()
        raise psycopg.OperationalError(problem)

    def _is_at_work(self) -> bool:
        """Return whether the server says that it works on this connection's statement."""
        query = "SELECT state = 'active' FROM pg_stat_activity WHERE pid = %s"
        pid = self.info.backend_pid
        arguments: dict[str, Any] = {**self.info.get_parameters(), **_SETTINGS}
        arguments["password"] = self.info.password
        try:
            with contextlib.closing(BoundedConnection.connect(**arguments)) as other:
                found = other.execute(query, [pid]).fetchone()
        except psycopg.Error:
            return False
        return found is not None and bool(found[0])


def make_engine(url: URL, limits: DatabaseLimits, **options: Any) -> Engine:
    """Create an engine whose connections have `limits`."""
    settings = {name: value for name, value in _SETTINGS.items() if name not in url.query}
    engine = create_engine(url, connect_args=settings, pool_pre_ping=True, **options)
    server = _SERVERS.setdefault(url.render_as_string(hide_password=True), _Server())

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: object, _record: object, args: Any, named: Any) -> BoundedConnection:
        server.check()
        began = time.monotonic()
        try:
            made: BoundedConnection = BoundedConnection.connect(*args, **named)
            _set(made, limits)
        except psycopg.OperationalError as error:
            if (took_s := time.monotonic() - began) < SLOW_S:
                raise
            problem = f"the server did not answer for {took_s:.0f} s"
            server.failed(problem)
            raise psycopg.OperationalError(f"{problem} ({error})") from error
        server.answered()
        made.server, made.limits = server, limits
        return made

    @event.listens_for(engine, "checkin")
    def returned(connection: BoundedConnection | None, _record: object) -> None:
        if connection is not None:
            connection.limits = PING

    @event.listens_for(engine, "checkout")
    def taken(connection: BoundedConnection, _record: object, _proxy: object) -> None:
        connection.limits = limits

    return engine


def allow_long_statements(connection: Any) -> None:
    """Give the transaction that has just begun the limits of writes, if it has shorter ones."""
    driver: BoundedConnection = connection.connection.driver_connection
    if driver.limits is ORDINARY:
        driver.limits = WRITES
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{WRITES.statement_s}s'")


def _set(connection: BoundedConnection, limits: DatabaseLimits) -> None:
    # A `SET` inside a transaction would be undone by its rollback.
    connection.autocommit = True
    connection.execute(
        f"SET statement_timeout = '{limits.statement_s}s'; "
        f"SET lock_timeout = '{limits.lock_s}s'; "
        f"SET idle_in_transaction_session_timeout = '{TRANSACTION_IDLE_S}s'"
    )
    connection.autocommit = False
