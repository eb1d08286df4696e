"""`holdfast doctor`: check whether this machine and its services can run jobs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import doctor_run
from holdfast.cli.doctor_checks import Finding, run_checks
from holdfast.cli.index import choose_root
from holdfast.cli.output import AsJson, RootOption, answer, say


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(doctor)


def doctor(
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Check this run's checkpoint instead."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="With --run: the number of GPUs.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", help="With --run: the checkpoint. Default: the newest."),
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and its services. With --run, check whether a checkpoint fits N GPUs."""
    if (run is None) != (gpus is None) or (checkpoint and run is None):
        raise typer.BadParameter("--run and --gpus go together, as in `--run my-run --gpus 4`")
    if run is not None and gpus is not None:
        fit = doctor_run.examine(run, gpus, checkpoint, root)
        answer(fit, as_json, doctor_run.render)
        ok = fit["ok"]
    else:
        ok = _check_machine(root, as_json)
    if not ok:
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
