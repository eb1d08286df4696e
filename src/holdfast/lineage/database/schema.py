"""The revision of a database's schema, and whether this version of Holdfast can use it."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, NullPool, inspect, select, text

from holdfast.lineage.database.engine import make_engine, parse_url, translate_errors
from holdfast.lineage.database.sqlite_file import REVISION_TABLE, head_revision, known_revisions
from holdfast.lineage.database.tables import COMPATIBILITY


def current_revision(url: str | None = None) -> str | None:
    """Return the schema's revision, or None if there is no schema yet."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return None
    return revision_of(parsed)


def schema_problem(url: str | None = None) -> str | None:
    """Return why this version cannot use the schema, with the next step; None if it can."""
    return problem_of(parse_url(url), current_revision(url))


def revision_of(url: URL) -> str | None:
    """Return the revision of the schema in the database at `url`, or None without a schema."""
    engine = make_engine(url, poolclass=NullPool)
    try:
        with translate_errors(url), engine.connect() as connection:
            if not inspect(connection).has_table(REVISION_TABLE):
                return None
            found = connection.scalar(text(f"SELECT version_num FROM {REVISION_TABLE}"))
            return None if found is None else str(found)
    finally:
        engine.dispose()


def problem_of(url: URL, found: str | None) -> str | None:
    """Return why this version cannot use a schema of revision `found`; None if it can."""
    if found == head_revision() or (found is not None and _is_compatible(url, found)):
        return None
    name = url.render_as_string(hide_password=True)
    if found is None:
        return f"{name}: the database has no Holdfast schema yet; run `holdfast db upgrade`"
    if found not in known_revisions():
        return newer_schema(url, found)
    return (
        f"{name}: the schema has revision {found}, but this Holdfast needs {head_revision()}; "
        "run `holdfast db upgrade`"
    )


def newer_schema(url: URL, found: str) -> str:
    """Return the message about a schema that only a newer Holdfast knows."""
    return (
        f"{url.render_as_string(hide_password=True)}: the schema has revision {found}, which is "
        f"newer than this Holdfast ({head_revision()}); upgrade Holdfast on this machine, or move "
        "the database away and run `holdfast reindex`, which fills a new one from the runs"
    )


def _is_compatible(url: URL, found: str) -> bool:
    """Return True for a newer schema that programs of this revision may still read and write."""
    if found in known_revisions():
        return False
    engine = make_engine(url, poolclass=NullPool)
    try:
        with translate_errors(url), engine.connect() as connection:
            if not inspect(connection).has_table(COMPATIBILITY.name):
                return False
            oldest = connection.scalar(select(COMPATIBILITY.c.oldest))
    finally:
        engine.dispose()
    # Revisions are four-digit numbers, so they compare as text.
    return oldest is not None and str(oldest) <= head_revision()
