"""`holdfast doctor`: whether this machine and what it talks to are fit to carry runs."""

from __future__ import annotations

from typing import Any

import typer

from holdfast.cli.doctor_checks import Finding, run_checks
from holdfast.cli.index import choose_root
from holdfast.cli.output import AsJson, RootOption, answer


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(doctor)


def doctor(root: RootOption = None, as_json: AsJson = False) -> None:
    """Check what runs need, one line each, with the next step where something is amiss."""
    findings = run_checks(choose_root(root))
    ok = all(finding.level != "fail" for finding in findings)
    facts: dict[str, Any] = {"ok": ok, "checks": [vars(finding) for finding in findings]}
    answer(facts, as_json, lambda _: _render(findings))
    if not ok:
        raise typer.Exit(1)


def _render(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        typer.echo(f"{finding.level:4}  {finding.name.ljust(width)}  {finding.detail}")
        if finding.next_step:
            typer.echo(f"{'':{width + 8}}next: {finding.next_step}")
