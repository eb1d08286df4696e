"""`holdfast relaunch|stop|pause|resume|cancel`: an operator's requests to a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.index import locate_run, look_at, user_name
from holdfast.cli.output import AsJson, RootOption, answer, say, warn
from holdfast.contracts.history import load_history
from holdfast.contracts.paths import RunPaths

if TYPE_CHECKING:
    from holdfast.workers.operator import Action

GOES_ON: Final = frozenset({"relaunch", "resume"})
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name, folder or uid.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    for command in (relaunch, stop, pause, resume, cancel):
        app.command()(command)


def relaunch(
    run: RunArgument,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs of the next attempt.")
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run in a new attempt. A live run saves a checkpoint first."""
    _ask(run, "relaunch", root, as_json, gpus=gpus)


def stop(run: RunArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Stop a run after a last checkpoint. `relaunch` continues it."""
    _ask(run, "stop", root, as_json)


def pause(run: RunArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Release a run's GPUs after a last checkpoint. `resume` continues it."""
    _ask(run, "pause", root, as_json)


def resume(run: RunArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Continue a paused run. `relaunch --gpus` continues it on another number of GPUs."""
    _ask(run, "resume", root, as_json)


def cancel(run: RunArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Cancel a run after a last checkpoint. Its checkpoints are kept."""
    _ask(run, "cancel", root, as_json)


def _ask(
    name: str, action: Action, root: str | None, as_json: bool, *, gpus: int | None = None
) -> None:
    """Record the request, start a supervisor if the run needs one, and print the result."""
    from holdfast.workers import operator
    from holdfast.workers.feasibility import Feasibility

    paths = locate_run(name, root)
    look_at(paths)
    if action in GOES_ON:
        from holdfast.flows.secrets import require_again

        # Checked before the request is recorded: the run would otherwise wait forever.
        require_again(paths)
    message = operator.request(paths, action, by=user_name(), gpus=gpus)
    if gpus is not None and (doubt := Feasibility.of(load_history(paths)).doubt(gpus)):
        warn(f"holdfast: {doubt}")
    started = _start_if_needed(paths, action)
    facts: dict[str, Any] = {
        "run": paths.name,
        "action": action,
        "gpus": gpus,
        "message": message,
        "state": load_history(paths).state.value,
        **started,
    }
    answer(facts, as_json, lambda data: say(data["message"]))


def _start_if_needed(paths: RunPaths, action: Action) -> dict[str, Any]:
    """Start a supervisor for a request to continue, unless the run has one; return the facts."""
    from holdfast.flows.start import Started, start_if_alone

    started = start_if_alone(paths, refresh=True) if action in GOES_ON else Started()
    if started.warning:
        warn(f"holdfast: {started.warning}")
    return started.as_json()
