"""`holdfast relaunch|stop|pause|resume|cancel|annotate`: what an operator asks of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.shared.arguments import RunsArgument, complete_checkpoint, locate_runs
from holdfast.cli.shared.index import locate_checkpoint, locate_run, look_at, user_name
from holdfast.cli.shared.output import AsJson, RootOption, answer, print_error, say, warn
from holdfast.contracts.disk.paths import (
    CheckpointName,
    RunPaths,
    checkpoint_id,
    plain_checkpoint,
)
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.annotations import annotate as change_annotation
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.supervision import is_supervised

if TYPE_CHECKING:
    from holdfast.flows.loaded_supervisor import LoadedSupervisor
    from holdfast.workers.runs.operator import Action

GOES_ON: Final = frozenset({"relaunch", "resume"})


def relaunch(
    runs: RunsArgument,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs of the next attempt.")
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run in a new attempt. A live run saves a checkpoint first."""
    _ask(runs, "relaunch", root, as_json, gpus)


def stop(runs: RunsArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Stop a run after a last checkpoint. `relaunch` continues it."""
    _ask(runs, "stop", root, as_json)


def pause(
    runs: RunsArgument,
    until_capacity: Annotated[
        bool,
        typer.Option(
            "--until-capacity",
            help="Let Prefect's deployment `resume/holdfast` continue it once its GPUs are free.",
        ),
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Release a run's GPUs after a last checkpoint. `resume` continues it."""
    from holdfast.workers.runs.until_capacity import UNTIL_CAPACITY

    if until_capacity:
        from holdfast.flows.start import require_resumer

        require_resumer()
    _ask(runs, "pause", root, as_json, reason=UNTIL_CAPACITY if until_capacity else "")


def resume(runs: RunsArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Continue a paused run. `relaunch --gpus` continues it on another number of GPUs."""
    _ask(runs, "resume", root, as_json)


def cancel(
    runs: RunsArgument,
    now: Annotated[
        bool,
        typer.Option(
            "--now",
            help="Do not save a last checkpoint. Also ends a cancellation that is still saving.",
        ),
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a run after a last checkpoint. Its checkpoints are kept."""
    _ask(runs, "cancel", root, as_json, now=now)


def annotate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CHECKPOINT...",
            help="Names, folders or uids of runs, or ids (run:step-…, run:latest) or paths of "
            "checkpoints.",
            autocompletion=complete_checkpoint,
        ),
    ],
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="A tag to add. Repeatable.")
    ] = None,
    untag: Annotated[
        list[str] | None, typer.Option("--untag", help="A tag to remove. Repeatable.")
    ] = None,
    note: Annotated[
        str | None, typer.Option("--note", help="The new note. Empty text removes the note.")
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Change the tags and the note of runs or checkpoints. The runs may have ended.

    `runs --tag` and the web UI find runs by their tags. The note replaces the former one.
    """
    found = list(dict.fromkeys(_target(one, root) for one in targets))
    facts, status = [], 0
    for paths, checkpoint in found:
        try:
            done = change_annotation(
                paths,
                checkpoint,
                add=tag or (),
                remove=untag or (),
                note=note,
                by=user_name(),
                via="cli",
            )
        except HoldfastError as error:
            if len(found) == 1:
                raise
            status = print_error(error, as_json=as_json)
            continue
        identity = checkpoint and checkpoint_id(paths.name, checkpoint)
        kept = {name: done.facts[name] for name in ("tags", "note")}
        facts.append({"run": paths.name, "checkpoint": identity, **kept})
    answer(facts if len(found) > 1 else facts[0], as_json, lambda _: _render_annotated(facts))
    if status:
        raise typer.Exit(status)


def _target(name: str, root: str | None) -> tuple[RunPaths, str | None]:
    """Return the run that an argument names, and the checkpoint if it names one."""
    _, colon, end = name.rpartition(":")
    if (colon and "/" not in end) or CheckpointName.parse(plain_checkpoint(name).name):
        return locate_checkpoint(name, root)
    return locate_run(name, root), None


def _render_annotated(facts: Sequence[Mapping[str, Any]]) -> None:
    for one in facts:
        tags = f"{counted(len(one['tags']), 'tag')}: {', '.join(one['tags'])}"
        say(f"{one['checkpoint'] or one['run']} has {tags if one['tags'] else 'no tags'}")
        if one["note"]:
            say(f"  note: {one['note']}")


def _ask(
    names: Sequence[str],
    action: Action,
    root: str | None,
    as_json: bool,
    gpus: int | None = None,
    reason: str = "",
    now: bool = False,
) -> None:
    """Make the request to every run, and print the results.

    A run that refuses it does not keep the others from it. The exit status is the last refusal's.
    """
    found, facts, status = locate_runs(names, root), [], 0
    for paths in found:
        loaded = _load_supervisor(paths) if action in GOES_ON else None
        try:
            with loaded or contextlib.nullcontext():
                facts.append(_ask_run(paths, action, gpus, reason=reason, now=now, loaded=loaded))
        except HoldfastError as error:
            if len(found) == 1:
                raise
            status = print_error(error, as_json=as_json)
    answer(facts if len(found) > 1 else facts[0], as_json, lambda _: _render(facts))
    if status:
        raise typer.Exit(status)


def _load_supervisor(paths: RunPaths) -> LoadedSupervisor | None:
    """Start to load a supervisor for a run that has none, before its history is read."""
    from holdfast.flows.start import load_supervisor

    is_alone = paths.is_mine() and is_supervised(paths.flow_lock) is False
    return load_supervisor(paths if is_alone else None)


def _render(facts: Sequence[Mapping[str, Any]]) -> None:
    for one in facts:
        say(one["message"])


def _ask_run(
    paths: RunPaths,
    action: Action,
    gpus: int | None,
    *,
    reason: str,
    now: bool,
    loaded: LoadedSupervisor | None = None,
) -> dict[str, Any]:
    """Record the request, start a supervisor if the run needs one, and return the facts."""
    from holdfast.flows.start import start_after
    from holdfast.workers.runs import operator
    from holdfast.workers.runs.feasibility import Feasibility

    look_at(paths)
    if action in GOES_ON:
        from holdfast.flows.supervisor.secrets import require_again

        # Checked before the request is recorded: the run would otherwise wait forever.
        require_again(paths)
    message = operator.request(paths, action, by=user_name(), gpus=gpus, reason=reason, now=now)
    if gpus is not None and (doubt := Feasibility.of(load_history(paths)).doubt(gpus)):
        warn(f"holdfast: {doubt}")
    started = start_after(paths, goes_on=action in GOES_ON, refresh=True, loaded=loaded)
    if started.warning:
        warn(f"holdfast: {started.warning}")
    return {
        "run": paths.name,
        "action": action,
        "gpus": gpus,
        "message": message,
        "state": load_history(paths).state.value,
        **started.as_json(),
    }
