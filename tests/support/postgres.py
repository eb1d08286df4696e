"""A temporary PostgreSQL server for tests, on loopback; its context stops it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
INITDB_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.05
STARTS_MAX: Final = 3
SUPERUSER: Final = "postgres"


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    """A running server; `host` is the directory of its socket."""

    directory: Path
    port: int
    _programs: Path
    _settings: Mapping[str, str]
    _process: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def url(self, database: str, *, host: str = "127.0.0.1") -> str:
        """The URL of one of its databases."""
        return f"postgresql://{SUPERUSER}@{host}:{self.port}/{database}"

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new, empty database that is dropped afterwards."""
        name = f"test_{next(self._serial)}"
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def restart(self) -> None:
        """Stop the server, disconnecting its clients, and start it again on the same port."""
        self.stop()
        self.start()

    def start(self) -> bool:
        """Start the server and wait for it; False if it does not start."""
        command = _as_server_user(
            *(str(self._programs / "postgres"), "-D", str(self.directory / "data")),
            *(part for key, value in self._settings.items() for part in ("-c", f"{key}={value}")),
        )
        with open(_log(self.directory), "ab") as log:
            process = subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log)
        self._process[:] = [process]
        return _is_up(process, self)

    def stop(self) -> None:
        """Stop the server if it runs."""
        for process in self._process:
            _stop(process)

    def execute(self, statement: str) -> None:
        """Run one statement outside any transaction, in the server's own database."""
        with psycopg.connect(self.url("postgres"), autocommit=True, connect_timeout=10) as session:
            session.execute(statement.encode())


@contextlib.contextmanager
def postgres_server(settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """A server with a new, empty cluster in a temporary folder.

    `settings` are added to those that make the server quick to start and to discard.
    Raises `RuntimeError` if PostgreSQL is not installed or does not start.
    """
    programs = _programs()
    directory = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, SUPERUSER, SUPERUSER)
        data = directory / "data"
        _initdb(programs, data)
        for attempt in range(STARTS_MAX):
            # Another process may take the port meanwhile; then another port is tried.
            server = _prepare(programs, directory, settings or {})
            try:
                if server.start():
                    yield server
                    return
            finally:
                server.stop()
            if attempt == STARTS_MAX - 1:
                raise RuntimeError(f"postgres did not start:\n{_log(directory).read_text()}")
    finally:
        shutil.rmtree(directory)


def _programs() -> Path:
    """The folder with initdb and postgres of the newest installed version."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    installed = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3])
    )
    if not installed:
        raise RuntimeError("PostgreSQL is not installed; run `apt-get install postgresql`")
    return installed[-1].parent


def _as_server_user(*command: str) -> list[str]:
    """The command as a user that PostgreSQL accepts; it ends when this process does."""
    become = ["--reuid", SUPERUSER, "--regid", SUPERUSER, "--clear-groups"]
    return [
        *("setpriv", "--pdeathsig", "INT"),
        *(become if os.geteuid() == 0 else []),
        *command,
    ]


def _initdb(programs: Path, data: Path) -> None:
    arguments = ("-D", str(data), "-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
    done = subprocess.run(
        _as_server_user(str(programs / "initdb"), *arguments),
        cwd=data.parent,
        capture_output=True,
        text=True,
        timeout=INITDB_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")


def _prepare(programs: Path, directory: Path, settings: Mapping[str, str]) -> PostgresServer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    chosen = {
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "unix_socket_directories": str(directory),
        "fsync": "off",
        "max_connections": "50",
        "shared_buffers": "16MB",
        **settings,
    }
    return PostgresServer(
        directory=directory, port=int(chosen["port"]), _programs=programs, _settings=chosen
    )


def _is_up(process: subprocess.Popen[bytes], server: PostgresServer) -> bool:
    give_up = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up:
        with contextlib.suppress(psycopg.OperationalError):
            server.execute("SELECT 1")
            return True
        time.sleep(POLL_S)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Fast shutdown (INT), or immediate (QUIT) if that takes too long; no effect if stopped."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGQUIT)
        process.wait(STOP_TIMEOUT_S)


def _log(directory: Path) -> Path:
    return directory / "postgres.log"
