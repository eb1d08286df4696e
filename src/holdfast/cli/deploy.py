"""`holdfast deploy`: the deployment `train/holdfast` and its work pool."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.output import AsJson, answer, say


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(deploy)


def deploy(
    pool: Annotated[
        str,
        typer.Option("--pool", help="The work pool. A process pool is created if it is missing."),
    ] = "holdfast",
    as_json: AsJson = False,
) -> None:
    """Create or update Prefect's deployment and its work pool."""
    from holdfast.flows.deployments import api_url
    from holdfast.flows.deployments import deploy as create

    name = create(pool)
    facts = {"deployment": name, "pool": pool, "url": api_url()}
    answer(facts, as_json, _render)


def _render(facts: dict[str, Any]) -> None:
    say(f"deployment {facts['deployment']} on pool {facts['pool']} at {facts['url']}")
    say(f"start a worker: prefect worker start --pool {facts['pool']}")
