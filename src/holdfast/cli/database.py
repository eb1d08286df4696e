"""`holdfast db upgrade|downgrade|current|reindex`: the index and its schema.

`holdfast reindex` is the same as `holdfast db reindex`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.shared import collector, index
from holdfast.cli.shared.arguments import confirm
from holdfast.cli.shared.output import AsJson, RootOption, answer, print_facts, say, warn
from holdfast.contracts.errors import NotFoundError, SpecError

db = typer.Typer(help="Manage the schema of the index.", no_args_is_help=True)


@db.command()
def upgrade(as_json: AsJson = False) -> None:
    """Upgrade the schema to the newest revision."""
    from holdfast.lineage.database import schema_changes

    revision = schema_changes.upgrade()
    answer({"revision": revision}, as_json, _render_revision)


@db.command()
def downgrade(
    revision: Annotated[
        str, typer.Argument(help="The revision to downgrade to; `base` removes the schema.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Downgrade the schema to an older revision.

    Asks before it removes the whole index, unless --yes is given. `reindex` fills it again.
    """
    from holdfast.lineage.database import schema_changes

    if not yes and (revision == "base" or revision.startswith("-")):
        what = "all rows of the index" if revision == "base" else "what newer revisions added"
        confirm("db downgrade", what, as_json)
    answer({"revision": schema_changes.downgrade(None, revision)}, as_json, _render_revision)


@db.command()
def current(as_json: AsJson = False) -> None:
    """Show the schema's revision, and whether this version can use it."""
    from holdfast.lineage.database import schema, sqlite_file

    found, problem = schema.current_revision(), schema.schema_problem()
    facts = {
        "revision": found,
        "head": sqlite_file.head_revision(),
        "ok": problem is None,
        "problem": problem,
    }
    answer(facts, as_json, _render_revision)
    if problem:
        raise typer.Exit(1)


@db.command()
def reindex(
    root: Annotated[
        Path | None,
        typer.Argument(
            metavar="ROOT",
            help="The folder that contains the runs. "
            "Default: $HOLDFAST_ROOT, else ~/.holdfast/runs.",
        ),
    ] = None,
    root_option: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the index of all runs under ROOT from disk.

    The exit status is 1 if a run cannot be read. The rows of that run do not change.
    """
    from holdfast.lineage.database.limits import REINDEX
    from holdfast.lineage.ingest.reindex import reindex as rebuild

    if root is not None and root_option is not None:
        raise SpecError(f"reindex: expected ROOT or --root, not both: {root} and {root_option}")
    home = index.choose_root(str(root) if root else root_option)
    if not home.is_dir():
        raise NotFoundError(
            f"{home}: no such directory. Expected the folder that contains the runs."
        )
    with index.open_index(REINDEX) as database:
        collector.return_free_memory()
        report = rebuild(database, home)
    facts: dict[str, Any] = {"root": str(home), **vars(report)}
    answer(facts, as_json, print_facts)
    for run, why in report.failed.items():
        warn(f"holdfast: {run}: cannot be read: {why}")
    if not report.ok:
        raise typer.Exit(1)


def _render_revision(facts: dict[str, Any]) -> None:
    say(facts.get("problem") or facts["revision"] or "no schema")
