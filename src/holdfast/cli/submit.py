"""`holdfast submit` and `holdfast fork`: start a run."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.shared import follow, index
from holdfast.cli.shared.arguments import Overrides, refuse_unused
from holdfast.cli.shared.exit_status import INTERRUPTED
from holdfast.cli.shared.output import AsJson, RootOption, answer, echo, say, warn
from holdfast.contracts.disk.paths import RunPaths, checkpoint_id
from holdfast.contracts.errors import NotFoundError, SchedulerError, SpecError
from holdfast.contracts.records import checkpoint_choice, saving
from holdfast.contracts.records.documents import Request, RunRecord
from holdfast.contracts.records.history import load_history, load_identity
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.written import settings_of
from holdfast.contracts.states import RunState

if TYPE_CHECKING:
    from holdfast.flows.loaded_supervisor import LoadedSupervisor

Wait = Annotated[bool, typer.Option("--wait", help="Show progress until the run has ended.")]


def submit(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="The run's spec, a TOML or YAML file.")],
    overrides: Overrides = None,
    wait: Wait = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the first job request and the source of each key, and queue nothing.",
        ),
    ] = False,
    skip_preflight: Annotated[
        bool,
        typer.Option(
            "--skip-preflight",
            help="Let the flow run the checks, if this machine cannot reach the cluster.",
        ),
    ] = False,
    no_preflight: Annotated[
        bool,
        typer.Option("--no-preflight", help="Run no checks before the job is queued."),
    ] = False,
    allow_early_exit: Annotated[
        bool,
        typer.Option(
            "--allow-early-exit",
            help="Accept a program that exits with status 0 before its last step as completed. "
            "Sets supervision.allow_early_exit.",
        ),
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Submit a run, or attach to the live one that has the same name and spec."""
    from holdfast.flows.parameters import load_spec
    from holdfast.flows.start import load_supervisor
    from holdfast.flows.supervisor import secrets
    from holdfast.workers.runs.run_folders import next_folder

    _check_options(context, dry_run, skip_preflight, no_preflight)
    accepted = ["supervision.allow_early_exit=true"] if allow_early_exit else []
    run_spec = load_spec(spec, [*(overrides or ()), *accepted])
    home = root_for(run_spec, root)
    for warning in secrets.plain_secret_warnings(run_spec):
        warn(f"holdfast: {warning}")
    if dry_run:
        _warn_before(run_spec)
        answer(_dry_run(run_spec, home), True, echo)
        return
    loaded = load_supervisor(next_folder(home, run_spec.name))
    with loaded or contextlib.nullcontext():
        if not skip_preflight and not no_preflight:
            from holdfast.flows.forks import check_everything

            check_everything(run_spec, home)
        paths, created, warnings = _create(run_spec, home, spec)
        how = {"created": created, "wait": wait, "as_json": as_json, "preflight": not no_preflight}
        start_and_follow(paths, warnings, loaded=loaded, **how)


def _create(spec: RunSpec, home: Path, file: Path) -> tuple[RunPaths, bool, list[str]]:
    """Return the run that `spec` describes, whether it was created, and warnings."""
    from holdfast.flows.supervisor import secrets
    from holdfast.workers.decisions.grace import warnings_of
    from holdfast.workers.runs.code_snapshot import snapshot_warnings
    from holdfast.workers.runs.run_folders import attach_or_create, own_generation
    from holdfast.workers.schedulers.slurm_defaults import warnings_of_defaults

    earlier = own_generation(home, spec.name)
    warnings = [*secrets.require(spec, earlier), *warnings_of(spec, earlier)]
    warnings += warnings_of_defaults(spec)
    paths, created = attach_or_create(spec, home, created_by=index.user_name())
    if created:
        warnings += [*left_behind(earlier, paths.name, file), *snapshot_warnings(spec)]
    elif new := sorted(set(spec.tags) - set(load_identity(paths)[1].tags)):
        words = " ".join(f"--tag {tag}" for tag in new)
        warnings.append(
            f"run {paths.name} keeps its tags, because the spec has those of a new run; `holdfast "
            f"annotate {paths.name} {words}` adds the new ones"
        )
    return paths, created, warnings


def fork(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help="The checkpoint to start from, as an id or a path.")
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="The new run's name. Default: the name in --spec."),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option("--spec", help="The new run's spec. Default: that of the checkpoint's run."),
    ] = None,
    overrides: Overrides = None,
    wait: Wait = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check that the fork is possible, print its first job request and the source of "
            "each key, and create nothing.",
        ),
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Start a new run, under another name, from a committed checkpoint."""
    from holdfast.flows.forks import fork_run, plan_fork
    from holdfast.flows.supervisor.secrets import plain_secret_warnings
    from holdfast.workers.decisions.grace import warnings_of
    from holdfast.workers.runs.code_snapshot import snapshot_warnings
    from holdfast.workers.runs.feasibility import Feasibility
    from holdfast.workers.schedulers.slurm_defaults import warnings_of_defaults

    parent, directory = index.locate_checkpoint(checkpoint, root)
    given: dict[str, Any] = {"name": name, "spec_file": spec, "overrides": overrides or ()}
    given["root"] = index.choose_root(root) if root else None
    if dry_run:
        refuse_unused(context, "--dry-run queues nothing", "wait")
        plan = plan_fork(parent, directory, **given)
        _warn_before(plan.spec)
        found = _dry_run(plan.spec, plan.root)
        answer({**found, "forked_from": plan.origin.checkpoint_id}, True, echo)
        return
    paths = fork_run(parent, directory, by=index.user_name(), **given)
    own = load_history(paths).spec
    warnings = [*plain_secret_warnings(own), *warnings_of(own, parent)]
    problem = Feasibility.of(load_history(paths)).problem(own.gpus)
    warnings += [problem] if problem else []
    warnings += [*warnings_of_defaults(own), *snapshot_warnings(own)]
    start_and_follow(paths, warnings, created=True, wait=wait, as_json=as_json)


def _check_options(
    context: typer.Context, dry_run: bool, skip_preflight: bool, no_preflight: bool
) -> None:
    """Raise `SpecError` for options that do nothing in this call."""
    if dry_run:
        why = "--dry-run queues nothing"
        refuse_unused(context, why, "wait", "skip_preflight", "no_preflight")
    if not skip_preflight:
        return
    from holdfast.flows.start import has_service

    if no_preflight or not has_service():
        why = "--no-preflight" if no_preflight else "no Prefect API is configured"
        raise SpecError(
            f"--skip-preflight and {why}: no flow would run the checks. Leave --skip-preflight "
            "out, or give only --no-preflight to run no checks at all"
        )


def left_behind(earlier: RunPaths | None, run: str, spec: Path) -> list[str]:
    """Warn of the checkpoints of a run that ended early, if `run` has its name and another spec."""
    from holdfast.workers.runs.run_folders import how_ended

    if earlier is None:
        return []
    history = load_history(earlier)
    if history.state is RunState.COMPLETED or history.spec.program.is_watched:
        # An opaque program finds its checkpoints itself.
        return []
    try:
        newest = checkpoint_choice.newest_of_branch(earlier, history)
    except NotFoundError:
        return []
    text = (
        f"run {run} starts at step 0, because its spec differs from that of run {earlier.name}, "
        f"which {how_ended(history.state)} and has a checkpoint of step {newest.step}. To continue "
        f"from it: `holdfast cancel {run} --now`, then `holdfast fork "
        f"{checkpoint_id(earlier.name, newest.name)} --spec {shlex.quote(str(spec))} --name NAME`"
    )
    return [text]


def root_for(spec: RunSpec, root: str | None) -> Path:
    """Return the folder of runs: `root`, that of the spec's storage block, or the default."""
    if root is None and spec.blocks.storage:
        from holdfast.flows.blocks import root_of

        if (found := root_of(spec.blocks.storage)) is not None:
            return found
    return index.choose_root(root)


def first_request(spec: RunSpec, root: Path) -> Request:
    """Return the job request of the first attempt, with a placeholder uid. Write nothing."""
    from holdfast.workers.runs import restarts
    from holdfast.workers.runs.request import build_request

    expedite = False
    # Without an answer of Slurm, the request is that of a cluster without expedited requeue.
    with contextlib.suppress(SchedulerError):
        expedite = restarts.is_allowed(spec, spec.gpus)
    record = RunRecord(
        uid="0" * 32,
        run=spec.name,
        name=spec.name,
        root=str(root),
        created_at=0.0,
        spec=spec.model_dump(mode="json"),
        spec_digest=spec.digest,
    )
    return build_request(record, spec, attempt=1, gpus=spec.gpus, reason="first", expedite=expedite)


def _warn_before(spec: RunSpec) -> None:
    """Warn of secrets without a value and of what a code snapshot would leave out."""
    from holdfast.flows.supervisor.secrets import examine
    from holdfast.workers.runs.code_snapshot import snapshot_warnings

    for text in (*examine(spec), *snapshot_warnings(spec)):
        warn(f"holdfast: {text}")


def _dry_run(spec: RunSpec, root: Path) -> dict[str, Any]:
    """Return the first request, and the value and the source of each key of the spec."""
    request = first_request(spec, root).model_dump(mode="json")
    return {**request, "settings": settings_of(spec, spec.sources)}


def start_and_follow(
    paths: RunPaths,
    warnings: Sequence[str] = (),
    *,
    created: bool,
    wait: bool,
    as_json: bool,
    preflight: bool = True,
    loaded: LoadedSupervisor | None = None,
) -> None:
    """Start a supervisor for a live run that has none, print the facts, and wait if asked to.

    `loaded` supervises the run, or ends before the wait.
    """
    from holdfast.flows.start import Started, start_if_alone

    history = index.look_at(paths)
    started = Started()
    if history.state.is_live:
        started = start_if_alone(paths, preflight=preflight, refresh=True, loaded=loaded)
    if loaded is not None:
        loaded.close()
    for warning in (*warnings, *([started.warning] if started.warning else [])):
        warn(f"holdfast: {warning}")
    facts: dict[str, Any] = {
        "run": paths.name,
        "uid": history.record.uid,
        "directory": str(paths.directory),
        "created": created,
        "state": history.state.value,
        "submitted_at": time.time(),
        "warnings": list(warnings),
        **started.as_json(),
    }
    if wait:
        try:
            facts.update(follow.follow_run(paths, started, show=not as_json))
        except KeyboardInterrupt:
            warn(f"holdfast: stopped waiting; {paths.name} continues (`holdfast stop` stops it)")
            raise typer.Exit(INTERRUPTED) from None
        trained = saving.trained_in(load_history(paths))
        facts["saves_by_holdfast"] = saving.saves_by_holdfast(trained)
        if facts["saves_by_holdfast"] is False:
            warn(f"holdfast: {saving.why_nothing_is_saved(trained)} by Holdfast")
        answer(facts, as_json, _render_end)
        raise typer.Exit(0 if facts["state"] == "completed" else 1)
    answer(facts, as_json, _render_submitted)


def _render_submitted(facts: dict[str, Any]) -> None:
    state = RunState(facts["state"])
    if not facts["created"] and not state.is_live:
        say(
            f"run {facts['run']} at {facts['directory']} has ended ({state}); nothing was submitted"
        )
        say(f"see `holdfast show {facts['run']}`; use another name to start another run")
        return
    verb = "created" if facts["created"] else "attached to"
    say(f"{verb} run {facts['run']} at {facts['directory']}")
    if facts["url"]:
        say(f"flow run: {facts['url']}")
    elif facts["service"]:
        say(f"supervisor: {facts['service']}, log {facts['log']}")
    elif facts["log"]:
        say(f"supervisor: process {facts['pid']}, log {facts['log']}")
    if state is RunState.PAUSED:
        say(f"it is paused; `holdfast resume {facts['run']}` continues it")
    say(f"watch it with `holdfast show {facts['run']}`")


def _render_end(facts: dict[str, Any]) -> None:
    say(f"{facts['run']} {facts['state']}: {facts['reason']}")
