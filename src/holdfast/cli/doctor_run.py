"""`holdfast doctor fit RUN --gpus N`: check whether a run's checkpoint fits N GPUs."""

from __future__ import annotations

from typing import Any, Final

from holdfast.cli.shared.index import locate_checkpoint, locate_run
from holdfast.cli.shared.output import bytes_text, print_facts, say
from holdfast.contracts.disk.paths import LATEST, RunPaths, checkpoint_id
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.checkpoint_choice import choose_checkpoint
from holdfast.contracts.records.history import load_history
from holdfast.workers.checkpoints.trainer_call import ask_trainer, interpreter_of

# Keys in the output of `python -m holdfast.trainer.shape` → labels.
PARTS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "other": "other state",
    "device": "total",
    "staging": "staging",
}


def examine(run: str, gpus: int, checkpoint: str | None, root: str | None) -> dict[str, Any]:
    """Return whether `gpus` GPUs can resume from the checkpoint, and the bytes each rank needs.

    `counts` in the answer are the GPU counts that the checkpoint and the spec allow. Raises
    `NotFoundError` if the run has no committed checkpoint, `CheckpointError` if the checkpoint is
    invalid, and `PreflightError` if the job's environment cannot be called.
    """
    from holdfast.flows import secrets
    from holdfast.workers.checkpoints.verification import directory_to_verify
    from holdfast.workers.decisions.sizes import problem_with
    from holdfast.workers.schedulers.slurm_defaults import warnings_of_defaults

    paths = locate_run(run, root)
    spec = load_history(paths).spec
    directory = directory_to_verify(paths, _choose(paths, checkpoint, root))
    python = interpreter_of(paths, spec)
    ranks = spec.ranks(gpus) if spec.can_split(gpus) else gpus
    shape = ask_trainer(python, "shape", str(directory.absolute()), "--ranks", str(ranks))
    problem = problem_with(spec, gpus) or shape.pop("problem")
    sizes = [size for count in shape["counts"] if (size := spec.size_of(count)) is not None]
    return {
        "ok": problem is None,
        "run": paths.name,
        "gpus": gpus,
        "checkpoint": checkpoint_id(paths.name, directory.name),
        "problem": problem,
        "ranks": ranks,
        "counts": [size for size in sizes if problem_with(spec, size) is None],
        "secrets": secrets.report(paths, spec),
        "warnings": warnings_of_defaults(spec),
        "bytes_per_rank": {part: shape[part] for part in PARTS},
    }


def render(facts: dict[str, Any]) -> None:
    """Print the result."""
    memory = facts["bytes_per_rank"]
    fits = "fits" if facts["ok"] else "does not fit"
    say(f"{facts['checkpoint']} {fits} {counted(facts['gpus'], 'GPU')}")
    for line in facts["secrets"]:
        say(f"  {line}")
    for line in facts["warnings"]:
        say(f"  warning: {line}")
    if facts["problem"]:
        say(f"  {facts['problem']}")
        return
    say("memory of the largest rank, without activations")
    print_facts({f"  {PARTS[part]}": bytes_text(size) for part, size in memory.items()})


def _choose(paths: RunPaths, checkpoint: str | None, root: str | None) -> str:
    """Return the directory name of `checkpoint`, or of the newest one on the run's branch."""
    if checkpoint is not None:
        owner, name = locate_checkpoint(checkpoint, root)
        if owner.directory.resolve() != paths.directory.resolve():
            raise NotFoundError(
                f"{checkpoint}: this checkpoint belongs to {owner.name}, not to {paths.name}"
            )
        return name
    return choose_checkpoint(paths, LATEST)
