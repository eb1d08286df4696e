"""`holdfast deploy`: Prefect's deployments, their work pool, and automations."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.shared.output import AsJson, answer, say
from holdfast.contracts.errors import SpecError


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
    automations: Annotated[
        bool,
        typer.Option(
            "--automations", help="Also create automations, such as one for crashed flows."
        ),
    ] = False,
    notify: Annotated[
        str,
        typer.Option(
            "--notify",
            metavar="TYPE/NAME",
            help="The notification block that alerts use, such as slack-webhook/team. Creates "
            "automations too.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Create or update Prefect's deployments and their work pool."""
    from holdfast.flows.deploying import POOL_TYPES, create_automations
    from holdfast.flows.deploying import deploy as create
    from holdfast.flows.deployments import api_url

    if kind not in {None, *POOL_TYPES}:
        raise SpecError(f"--type {kind!r}: expected {' or '.join(POOL_TYPES)}")
    names = create(pool, kind or "")
    created = create_automations(notify) if automations or notify else []
    facts = {
        "deployment": names[0],
        "deployments": names,
        "pool": pool,
        "url": api_url(),
        "automations": created,
    }
    answer(facts, as_json, _render)


def _render(facts: dict[str, Any]) -> None:
    for name in facts["deployments"]:
        say(f"deployment {name} on pool {facts['pool']} at {facts['url']}")
    for name in facts["automations"]:
        say(f"automation {name}")
    say(f"start a worker: prefect worker start --pool {facts['pool']}")
