"""The callback that users add to their `Trainer`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning.pytorch import callbacks
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from holdfast.contracts.errors import SpecError
from holdfast.contracts.node.reporting import report
from holdfast.trainer.frameworks.lightning.fit import TrainerFit

# The events of each step, none of which Holdfast uses. For each callback with a method for an
# event, Lightning enters a context of its profiler.
EVENTS_OF_STEP: Final = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
STRATEGIES: Final = (DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy)
REFUSED: Final = {
    callbacks.OnExceptionCheckpoint: (
        "Holdfast resumes from its own newest checkpoint, and this callback makes Lightning load "
        "the file that it wrote. Remove it"
    ),
    callbacks.LearningRateFinder: (
        "it trains inside of fit. Find the learning rate in a separate program"
    ),
    callbacks.BatchSizeFinder: (
        "it trains inside of fit. Find the batch size in a separate program"
    ),
    callbacks.StochasticWeightAveraging: (
        "it replaces the learning rate schedulers while it trains, and a resume begins with those "
        "of configure_optimizers, so the learning rates would differ. Use WeightAveraging or "
        "EMAWeightAveraging, and a schedule that ends as you want"
    ),
    callbacks.SpikeDetection: (
        "Lightning cannot load its state, so no run could resume. Use Holdfast's own policy: "
        "supervision.numerics.on_spike in the spec"
    ),
    callbacks.ModelPruning: (
        "it replaces parameters of the model while it trains, and a resume begins with a model "
        "that has none of them. Prune in a separate program, from a finished checkpoint"
    ),
    callbacks.BaseFinetuning: (
        "it adds groups of parameters to the optimizer while it trains, and a resume begins with "
        "those of configure_optimizers. Give all parameters to the optimizer from the start, and "
        "let a hook of your module set requires_grad by the epoch"
    ),
}


class Holdfast(callbacks.Callback):
    """Makes `Trainer.fit` fault tolerant: `Trainer(..., callbacks=[Holdfast()])`.

    `fit` resumes from the run's newest checkpoint that verifies. After a stop signal, all ranks
    leave after the same optimizer step, with a committed checkpoint, and the program ends with
    status 0. What the program logs with `self.log` is in the run's metrics.
    """

    _has_fitted = False

    def __init__(
        self,
        *,
        interval: int | str | None = None,
        snapshots: int | str | None = None,
        directory: str | Path | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        exclude: str | Sequence[str] = (),
    ) -> None:
        """The arguments are those of `Session`.

        Args:
            interval: optimizer steps (`50`) or seconds (`"10m"`) between checkpoints, or `"auto"`.
            snapshots: steps between snapshots, `"auto"` or `"off"`.
            directory: the run's folder when there is no agent.
            strict: refuse a checkpoint whose keys differ from those of the program.
            rename: saved names to new ones, once, for a checkpoint that does not fit.
            exclude: parts that keep their values, once, for a checkpoint that does not fit.
        """
        parts = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._options = {
            "interval": interval,
            "snapshots": snapshots,
            "directory": directory,
            "strict": strict,
            "rename": rename,
            "exclude": parts,
        }
        self._fit: TrainerFit | None = None
        for event in EVENTS_OF_STEP:
            # Lightning leaves out what it cannot call. A subclass keeps its own methods.
            if getattr(type(self), event) is getattr(callbacks.Callback, event):
                setattr(self, event, None)

    # Lightning calls all callbacks with (trainer, module).

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over the trainer's `fit`. Raises `SpecError` for settings that cannot work."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        check(trainer)
        if Holdfast._has_fitted:
            raise SpecError(
                "Holdfast: this process calls trainer.fit a second time. A run is one training, "
                "and the second one would resume from the first one's last checkpoint. Give each "
                "training its own program and run"
            )
        Holdfast._has_fitted = True
        # Other callbacks find their states restored when fit starts.
        others = [each for each in trainer.callbacks if each is not self]
        trainer.callbacks = [self, *others]
        self._fit = TrainerFit(trainer, self._options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the newest checkpoint. The model is wrapped, and the optimizers exist."""
        if self._fit is not None:
            self._fit.open()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the evaluation, whose loaders the trainer makes after those of the training."""
        if self._fit is not None:
            self._fit.data.check_evaluation()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The hang detector compares evaluations with each other."""
        if self._fit is not None:
            self._fit.begin_evaluation()

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        """Report that this rank is alive."""
        if self._fit is not None and self._fit.session is not None:
            self._fit.session.beat()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit is not None:
            self._fit.finish_evaluation()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.abandon(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """After a stop, the last checkpoint is committed. Release everything."""
        if self._fit is not None:
            self._fit.close()


def torchrun_size() -> dict[str, int]:
    """Return `devices` and `num_nodes` for `Trainer` or `Fabric`, as torchrun started the program.

    So the same command works at any number of ranks: `Trainer(**torchrun_size(), ...)`.
    """
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return {"devices": devices, "num_nodes": int(os.environ.get("WORLD_SIZE", 1)) // devices}


def check(trainer: Any) -> None:
    """Raise `SpecError` if the trainer has a setting that cannot work under Holdfast.

    Slurm's requeue is turned off, with a message, because the run's supervisor submits jobs.
    """
    if sum(isinstance(each, Holdfast) for each in trainer.callbacks) > 1:
        raise SpecError(
            "Trainer(callbacks=...) has Holdfast twice: each would save and resume. Pass it once"
        )
    for each in trainer.callbacks:
        for kind, advice in REFUSED.items():
            if isinstance(each, kind):
                raise SpecError(f"the callback {kind.__name__} cannot work with Holdfast: {advice}")
    strategy = trainer.strategy
    if not isinstance(strategy, STRATEGIES):
        raise SpecError(
            f"the strategy {type(strategy).__name__} is not supported; use one of "
            f"{', '.join(kind.__name__ for kind in STRATEGIES)}. For FSDP, use "
            "ModelParallelStrategy with fully_shard"
        )
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        environment.auto_requeue = False
        if trainer.is_global_zero:
            report(
                "holdfast: Lightning's requeue on Slurm is off, because the run's supervisor "
                "submits jobs. Pass SLURMEnvironment(auto_requeue=False) to say so yourself"
            )
    if trainer.world_size > 1 and not environment.creates_processes_externally:
        raise SpecError(
            f"Lightning itself started {trainer.world_size} processes; start the program with "
            "`holdfast submit`, or with torchrun, so that each rank has its place in the run"
        )
