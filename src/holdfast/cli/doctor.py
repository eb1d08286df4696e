"""`holdfast doctor`: check whether this machine and its services can run jobs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import doctor_run
from holdfast.cli.doctor_checks import Finding, run_checks
from holdfast.cli.shared.arguments import RunArgument
from holdfast.cli.shared.index import choose_root
from holdfast.cli.shared.output import AsJson, RootOption, answer, say


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(doctor)
    group.command()(fit)
    app.add_typer(group, name="doctor")


def doctor(context: typer.Context, root: RootOption = None, as_json: AsJson = False) -> None:
    """Check whether this machine and its services can run jobs."""
    if context.invoked_subcommand is not None:
        if root is not None or as_json:
            raise typer.BadParameter(
                f"give --root and --json after the command, as in `{context.command_path} "
                f"{context.invoked_subcommand} --json`"
            )
        return
    if not _check_machine(root, as_json):
        raise typer.Exit(1)


def fit(
    run: RunArgument,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="The number of GPUs.")],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="The checkpoint. Default: the newest.")
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a run's checkpoint fits a number of GPUs, and how much memory each needs."""
    facts = doctor_run.examine(run, gpus, checkpoint, root)
    answer(facts, as_json, doctor_run.render)
    if not facts["ok"]:
        raise typer.Exit(1)


def _check_machine(root: str | None, as_json: bool) -> bool:
    findings = run_checks(choose_root(root))
    ok = all(finding.level != "fail" for finding in findings)
    facts: dict[str, Any] = {"ok": ok, "checks": [vars(finding) for finding in findings]}
    answer(facts, as_json, lambda _: _render(findings))
    return ok


def _render(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(f"{finding.level:4}  {finding.name.ljust(width)}  {finding.detail}")
        if finding.next_step:
            say(f"{'':{width + 8}}next: {finding.next_step}")
