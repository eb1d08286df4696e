"""`holdfast doctor --run RUN --gpus N`: whether a run's checkpoint fits that many GPUs."""

from __future__ import annotations

from typing import Any, Final

from holdfast.cli.index import locate_checkpoint, locate_run
from holdfast.cli.output import bytes_text, print_facts, say
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.history import load_history
from holdfast.contracts.paths import RunPaths, checkpoint_id
from holdfast.workers.trainer_call import ask_trainer, interpreter_of

# What `python -m holdfast.trainer.shape` calls them → what people read.
PARTS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "other": "other state",
    "device": "sum",
    "staging": "staging",
}


def examine(run: str, gpus: int, checkpoint: str | None, root: str | None) -> dict[str, Any]:
    """Whether `gpus` ranks can go on from the run's checkpoint, and what each would need, in bytes.

    Raises `NotFoundError` when the run has no committed checkpoint, `CheckpointError` when that
    cannot be believed, `PreflightError` when the job's environment cannot be asked.
    """
    from holdfast.flows import secrets
    from holdfast.workers.sizes import problem_with

    paths = locate_run(run, root)
    spec = load_history(paths).spec
    directory = paths.checkpoint(_choose(paths, checkpoint, root))
    python = interpreter_of(paths, spec)
    shape = ask_trainer(python, "shape", str(directory.absolute()), "--gpus", str(gpus))
    problem = problem_with(spec, gpus) or shape.pop("problem")
    return {
        "ok": problem is None,
        "run": paths.name,
        "gpus": gpus,
        "checkpoint": checkpoint_id(paths.name, directory.name),
        "problem": problem,
        "counts": [n for n in shape["counts"] if problem_with(spec, n) is None],
        "secrets": secrets.report(paths, spec),
        "bytes_per_rank": {part: shape[part] for part in PARTS},
    }


def render(facts: dict[str, Any]) -> None:
    """The answer for people."""
    memory = facts["bytes_per_rank"]
    fits = "fits" if facts["ok"] else "does not fit"
    say(f"{facts['checkpoint']} {fits} {facts['gpus']} GPUs")
    for line in facts["secrets"]:
        say(f"  {line}")
    if facts["problem"]:
        say(f"  {facts['problem']}")
        return
    say("memory of the largest rank, activations not counted")
    print_facts({f"  {PARTS[part]}": bytes_text(size) for part, size in memory.items()})


def _choose(paths: RunPaths, checkpoint: str | None, root: str | None) -> str:
    """The directory name of the checkpoint asked for, else of the newest one of the branch."""
    from holdfast.workers.feasibility import newest_of_branch

    if checkpoint is not None:
        owner, name = locate_checkpoint(checkpoint, root)
        if owner.directory.resolve() != paths.directory.resolve():
            raise NotFoundError(f"{checkpoint}: a checkpoint of {owner.name}, not of {paths.name}")
        return name
    return newest_of_branch(paths, load_history(paths)).name
