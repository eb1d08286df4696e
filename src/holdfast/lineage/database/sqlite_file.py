"""The database's address, SQLite's file, and the revisions of the schema, without SQLAlchemy.

A submission checks the database with this module alone, because SQLAlchemy takes a third of a
second to import.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import filesystems, paths
from holdfast.contracts.errors import LineageError

URL_VARIABLE: Final = "HOLDFAST_DATABASE_URL"
# An absolute path. Any other URL is for SQLAlchemy.
_SQLITE: Final = "sqlite:////"
# Where Alembic writes the revision.
REVISION_TABLE: Final = "alembic_version"


def _find_migrations() -> Path:
    """Return the folder of the migrations: in a wheel, of this package; in a checkout, alembic/."""
    here = Path(__file__).resolve()
    installed = here.parents[1] / "migrations"
    return installed if installed.is_dir() else here.parents[4] / "alembic"


MIGRATIONS: Final = _find_migrations()


def database_url() -> str:
    """Return `$HOLDFAST_DATABASE_URL`, by default SQLite in `$HOLDFAST_HOME/holdfast.db`."""
    given = os.environ.get(URL_VARIABLE)
    return given or f"sqlite:///{paths.holdfast_home() / 'holdfast.db'}"


def head_revision() -> str:
    """Return the schema revision of this version of Holdfast."""
    return known_revisions()[-1]


def known_revisions() -> list[str]:
    """Return the revisions of this version, oldest first.

    They are the numbers at the start of the names of the migrations' files.
    """
    return sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("0*.py"))


def is_ready() -> bool:
    """Return whether the database is a SQLite file with this version's schema, or an empty one.

    An empty file is created if there is none: the next opening makes the schema. False says
    nothing: only `open_database` can tell more. Raises `LineageError` for a file that SQLite cannot
    use, as `open_database` does.
    """
    url = database_url()
    if not url.startswith(_SQLITE) or "?" in url or "%" in url:
        return False
    path = Path(url.removeprefix("sqlite:///"))
    prepare_file(path)
    create_private(path)
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=1.0, isolation_level=None)) as file:
            # A folder or file that cannot be written fails here.
            file.execute("BEGIN IMMEDIATE")
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
            found = []
            if REVISION_TABLE in tables:
                found = file.execute(f"SELECT version_num FROM {REVISION_TABLE}").fetchall()
            file.execute("ROLLBACK")
    except sqlite3.Error:
        return False
    return found == [(head_revision(),)] if tables else True


def prepare_file(path: Path) -> None:
    """Create the folder of a SQLite file. Raise `LineageError` on a network file system."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LineageError(
            f"{path.parent}: the folder cannot be created ({error.strerror}); set HOLDFAST_HOME to "
            f"a folder of your own on a local disk, or {URL_VARIABLE} to a PostgreSQL server"
        ) from error
    mounted = filesystems.filesystem_of(path)
    if mounted.is_network:
        # SQLite's locks and shared memory do not work between hosts.
        raise LineageError(
            f"{path} is on a network file system ({mounted.kind}), where SQLite's locks do not "
            "work and the file can be damaged; set HOLDFAST_HOME to a folder on a local disk, or "
            f"{URL_VARIABLE} to a PostgreSQL server (postgresql://user@host/holdfast)"
        )


def create_private(path: Path) -> None:
    """Create a SQLite file that only its owner can read, unless it exists.

    It contains the specs and journals of all runs. SQLite gives its log and shared memory the
    same permissions.
    """
    # SQLite reports all other problems with the path.
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
