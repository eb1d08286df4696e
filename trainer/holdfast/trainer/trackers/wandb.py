"""Weights & Biases: one W&B run for each run of Holdfast.

The run's uid is the W&B id, and `resume="allow"` continues it (`wandb.init`, wandb 0.31). Metrics
have the axis `step`, because evaluations report for earlier steps, and W&B's own steps only grow.

With `rewind`, W&B's own step is the program's, so that `resume_from` can drop the points after the
step that a launch resumed from. Not every server and plan can do that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from holdfast.contracts.errors import SpecError
from holdfast.contracts.node.reporting import report
from holdfast.trainer.trackers.tracker import TrackedRun, Tracker
from holdfast.trainer.versions import require

STEP: Final = "step"
CHECKPOINT_STEP: Final = "checkpoint_step"
OURS: Final = frozenset({"id", "resume", "resume_from", "fork_from", "reinit"})


class WandbTracker(Tracker):
    """A run of Weights & Biases. `run` is the `wandb.Run` once the session tracks it on rank 0."""

    name: ClassVar[str] = "wandb"

    def __init__(self, *, rewind: bool = False, **settings: Any) -> None:
        """`settings` are arguments of `wandb.init`, such as `project`, `config` and `mode`.

        With `rewind`, a relaunch has W&B drop the points after its first step. If W&B refuses
        that, and without `rewind`, steps that a relaunch repeats appear twice: a killed process
        may have points that W&B did not get, so none may be left out.

        Raises `PreflightError` if wandb is missing or not supported, and `SpecError` for an
        argument that Holdfast sets.
        """
        require("wandb")
        if wrong := sorted(OURS & set(settings)):
            raise SpecError(
                f"{', '.join(wrong)}: Holdfast sets these arguments of wandb.init, so that a run "
                "stays one run over all relaunches; leave them out"
            )
        self._settings, self._rewinds = settings, rewind
        self.run: Any = None
        self._newest = 0

    def open(self, run: TrackedRun) -> str:
        """Create or continue the W&B run."""
        settings = {"name": run.name, **self._settings}
        self.run = self._rewind(run, settings) or self._continue(run, settings)
        self._newest = run.step
        self.run.config.update({"holdfast": run.facts}, allow_val_change=True)
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP)
        return str(self.run.id)

    @property
    def url(self) -> str | None:
        """The run's page, or None if it is offline."""
        return self.run.url if self.run is not None else None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        if self._rewinds:
            self._newest = max(self._newest, step)
            self.run.log({**values, STEP: step}, step=self._newest)
        else:
            self.run.log({**values, STEP: step})

    def log_reported(self, step: int, values: Mapping[str, float]) -> None:
        """Record what an evaluation reported for the checkpoint of `step`."""
        if not self._rewinds:
            self.log(step, values)
            return
        # W&B's newest step has the axis of the program's metrics, so these have another one.
        for name in values:
            self.run.define_metric(name, step_metric=CHECKPOINT_STEP)
        self.run.log({**values, CHECKPOINT_STEP: step}, step=self._newest)

    def _continue(self, run: TrackedRun, settings: dict[str, Any]) -> Any:
        import wandb

        return wandb.init(id=run.known_id or run.uid, resume="allow", **settings)

    def _rewind(self, run: TrackedRun, settings: dict[str, Any]) -> Any:
        """Return the W&B run without the points after `run.step`, or None if it stays as it is."""
        import wandb

        if not self._rewinds or run.known_id is None or run.step <= 0:
            return None
        try:
            mode = settings.get("mode") or os.environ.get("WANDB_MODE") or "online"
            if mode != "online":
                raise SpecError(f"the mode of W&B is {mode}, and only a server can drop points")
            found = wandb.init(resume_from=f"{run.known_id}?_step={run.step}", **settings)
        # W&B's server refuses it with errors of many kinds.
        except Exception as error:
            report(
                f"holdfast: wandb: the run is not rewound to step {run.step}: {error}; repeated "
                "steps appear twice",
                is_error=True,
            )
            return None
        self.has_dropped_later = True
        return found

    def close(self, *, is_orderly: bool) -> None:
        """Send what is left. A relaunch continues the W&B run."""
        self.run.finish(exit_code=0 if is_orderly else 1)
