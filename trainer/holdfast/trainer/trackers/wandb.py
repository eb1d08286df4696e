"""Weights & Biases: one W&B run for each run of Holdfast.

The run's uid is the W&B id, and `resume="allow"` continues it (`wandb.init`, wandb 0.31). W&B drops
a step that is logged again, such as after a crash, if it is W&B's own step. So metrics have the
axis `step` instead, and both lines of a repeated step are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from holdfast.contracts.errors import SpecError
from holdfast.trainer.trackers.tracker import TrackedRun, Tracker
from holdfast.trainer.versions import require

STEP: Final = "step"
OURS: Final = frozenset({"id", "resume", "resume_from", "fork_from", "reinit"})


class WandbTracker(Tracker):
    """A run of Weights & Biases. `run` is the `wandb.Run` once the session tracks it on rank 0."""

    name: ClassVar[str] = "wandb"

    def __init__(self, **settings: Any) -> None:
        """`settings` are arguments of `wandb.init`, such as `project`, `config` and `mode`.

        Raises `PreflightError` if wandb is missing or not supported, and `SpecError` for an
        argument that Holdfast sets.
        """
        require("wandb")
        if wrong := sorted(OURS & set(settings)):
            raise SpecError(
                f"{', '.join(wrong)}: Holdfast sets these arguments of wandb.init, so that a run "
                "stays one run over all relaunches; leave them out"
            )
        self._settings = settings
        self.run: Any = None

    def open(self, run: TrackedRun) -> str:
        """Create or continue the W&B run."""
        import wandb

        settings = {"name": run.name, **self._settings}
        self.run = wandb.init(id=run.known_id or run.uid, resume="allow", **settings)
        self.run.config.update({"holdfast": run.facts}, allow_val_change=True)
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP)
        return str(self.run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self.run.log({**values, STEP: step})

    def close(self, *, is_orderly: bool) -> None:
        """Send what is left. A relaunch continues the W&B run."""
        self.run.finish(exit_code=0 if is_orderly else 1)
