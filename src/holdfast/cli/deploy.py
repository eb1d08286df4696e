"""`holdfast deploy`: the deployment `train/holdfast` and its work pool."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.output import AsJson, answer, say
from holdfast.contracts.errors import SpecError


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(deploy)


def deploy(
    pool: Annotated[
        str,
        typer.Option("--pool", help="The work pool. It is created if it is missing."),
    ] = "holdfast",
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="The pool's type: process, or holdfast, whose flows outlive the worker.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create or update Prefect's deployment and its work pool."""
    from holdfast.flows.deployments import POOL_TYPES, api_url
    from holdfast.flows.deployments import deploy as create

    if kind not in {None, *POOL_TYPES}:
        raise SpecError(f"--type {kind!r}: expected {' or '.join(POOL_TYPES)}")
    name = create(pool, kind or "")
    facts = {"deployment": name, "pool": pool, "url": api_url()}
    answer(facts, as_json, _render)


def _render(facts: dict[str, Any]) -> None:
    say(f"deployment {facts['deployment']} on pool {facts['pool']} at {facts['url']}")
    say(f"start a worker: prefect worker start --pool {facts['pool']}")
