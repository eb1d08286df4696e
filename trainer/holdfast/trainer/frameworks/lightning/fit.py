"""One `Trainer.fit` under a session: where it opens, ends its steps, stops and closes.

What Lightning knows beside weights, optimizers and schedulers is in two objects of the session.
`SharedState` is the same on all ranks: counters of the loops, callbacks, hooks, precision, data
module. `RankState` differs between ranks: random states at the start of the epoch, loaders, metrics
of the epoch. At another number of ranks the session leaves it out.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException

from holdfast.contracts import environment
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history import excluded_checkpoints, load_events
from holdfast.trainer.frameworks.lightning.data import TrainingData
from holdfast.trainer.frameworks.lightning.files import StrategyFiles, model_checkpoints
from holdfast.trainer.frameworks.lightning.metrics import EpochMetrics
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.process.program import program_stem
from holdfast.trainer.ranks.rank_context import choose_directory
from holdfast.trainer.state import rng
from holdfast.trainer.state.objects import RankLimited

FORMAT: Final = 1
# Tensors of at most this many elements become plain numbers. A new best score or a new metric then
# does not change the layout of the checkpoint, which all ranks would have to plan again.
SMALL_ELEMENTS: Final = 64
SMALL: Final = "$small"
LIVE: Final = "$live"
WEIGHTS: Final = "state_dict"
# Attributes of `ModelCheckpoint` that its own state does not contain: whether this step was saved,
# and whether a save waits for the evaluation.
OF_MODEL_CHECKPOINT: Final = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
)


class LoopPlace(StrEnum):
    """Where in Lightning's loops a checkpoint was made, and so what a resume runs first.

    AFTER_STEP: the evaluation that follows the step, if it is due, and the end of the epoch.
    AFTER_EVALUATION: the next batch. BETWEEN_EPOCHS: the next epoch.
    """

    AFTER_STEP = "after_step"
    AFTER_EVALUATION = "after_evaluation"
    BETWEEN_EPOCHS = "between_epochs"


class SharedState(RankLimited):
    """The state of a trainer that is the same on all ranks."""

    def __init__(self, fit: TrainerFit) -> None:
        self._fit = fit
        # Whether a checkpoint had this state.
        self.is_restored = False

    def state_dict(self) -> dict[str, Any]:
        """Return plain data. The hooks `on_save_checkpoint` of callbacks and module are called."""
        fit, trainer = self._fit, self._fit.trainer
        loops = trainer.fit_loop
        if fit.session is not None:
            fit.files.cover(fit.session.step)
        return {
            "format": FORMAT,
            "lightning": pl.__version__,
            "place": str(fit.place),
            "loops": _loops_of(fit),
            "checkpoint": pack(_checkpoint_of(trainer)),
            "model_checkpoints": {
                each.state_key: {name: getattr(each, name) for name in OF_MODEL_CHECKPOINT}
                for each in model_checkpoints(trainer)
            },
            "trainer": {
                "should_stop": trainer.should_stop,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "has_evaluation_data": loops.epoch_loop.val_loop._combined_loader is not None,
                "reloaded_train": loops._last_train_dl_reload_epoch,
                "reloaded_evaluation": loops.epoch_loop.val_loop._last_val_dl_reload_epoch,
            },
            "metrics": pack(fit.metrics.shared_state()),
            "data": fit.data.shared_state(),
            "files": fit.files.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything except weights, optimizers and schedulers, which the session restores.

        Raises `CheckpointError` for a newer format, and if the data cannot continue at this number
        of ranks.
        """
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"the state of Lightning's trainer has format {state['format']!r}, written with "
                f"lightning {state['lightning']}; this version of Holdfast reads {FORMAT}"
            )
        fit, trainer = self._fit, self._fit.trainer
        checkpoint = unpack(state["checkpoint"])
        fit.files.load_state_dict(state["files"], checkpoint["callbacks"])
        trainer.fit_loop.load_state_dict(state["loops"])
        # Lightning's sanity check is for new runs.
        trainer.fit_loop.epoch_loop.val_loop._restarting = True
        _apply_checkpoint(trainer, checkpoint)
        for each in model_checkpoints(trainer):
            for name, value in state["model_checkpoints"].get(each.state_key, {}).items():
                setattr(each, name, value)
        fit.metrics.load_shared(unpack(state["metrics"]))
        fit.data.load_shared(state["data"])
        fit.resume_at(LoopPlace(state["place"]), state["trainer"])
        self.is_restored = True

    def rank_limits(self) -> dict[str, Any]:
        return self._fit.data.rank_limits()


class RankState:
    """The state of a trainer that differs between ranks."""

    def __init__(self, fit: TrainerFit) -> None:
        self._fit = fit

    def state_dict(self) -> dict[str, Any]:
        return {
            "data": self._fit.data.rank_state(),
            "metrics": self._fit.metrics.rank_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fit.data.load_rank(state["data"])
        self._fit.metrics.load_rank(state["metrics"])


def pack(value: Any) -> Any:
    """Return `value` with small tensors replaced by plain numbers, exactly."""

    def small(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.numel() > SMALL_ELEMENTS:
            return tensor
        plain = tensor.detach().cpu()
        exact = plain.double() if plain.is_floating_point() else plain
        kind = str(tensor.dtype).removeprefix("torch.")
        return {SMALL: [kind, str(tensor.device), exact.tolist()]}

    return _mapped(value, small)


def unpack(value: Any) -> Any:

    def large(item: Any) -> Any:
        if not isinstance(item, Mapping) or set(item) != {SMALL}:
            return item
        kind, device, numbers = item[SMALL]
        return torch.tensor(numbers, dtype=getattr(torch, kind), device=device)

    return _mapped(value, large)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to each item, outside before inside."""
    value = change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_mapped(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _loops_of(fit: TrainerFit) -> dict[str, Any]:
    fit.is_capturing = True
    try:
        state: dict[str, Any] = fit.trainer.fit_loop.state_dict()
    finally:
        fit.is_capturing = False
    return state


def _checkpoint_of(trainer: Any) -> dict[str, Any]:
    """Return what Lightning's `dump_checkpoint` adds to weights, optimizers and schedulers.

    Hooks find the live weights under `state_dict`. What they leave there unchanged is not saved
    again.
    """
    weights = trainer.lightning_module.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        WEIGHTS: weights,
        "callbacks": call._call_callbacks_state_dict(trainer),
    }
    precision = trainer.precision_plugin
    if state := precision.state_dict():
        checkpoint[type(precision).__qualname__] = state
    precision.on_save_checkpoint(checkpoint)
    data = trainer.datamodule
    if data is not None and (state := call._call_lightning_datamodule_hook(trainer, "state_dict")):
        checkpoint[type(data).__qualname__] = state
    call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
    return {key: LIVE if item is weights else item for key, item in checkpoint.items()}


def _apply_checkpoint(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Restore data module, callbacks and precision, with their hooks, in Lightning's order."""
    weights = trainer.lightning_module.state_dict()
    # Values may be tensors, whose comparison is a tensor.
    loaded = {
        key: weights if isinstance(item, str) and item == LIVE else item
        for key, item in checkpoint.items()
    }
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = loaded
    try:
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", loaded)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
    finally:
        connector._loaded_checkpoint = {}


# Lightning's loops and its checkpoint connector, with the places that a resume needs.
#
# `TrainerFit` gives the trainer's own objects these classes, so they keep all that Lightning has
# put into them. The batch loop of Lightning 2.6, and where its boundary is:
#
#     advance           fetch, forward, backward, optimizer step, on_train_batch_end
#                       ── boundary: the step is complete, all ranks may stop here ──
#     on_advance_end    evaluation if it is due, plateau schedulers, counters of the loggers
#
# So a stop does not wait for an evaluation. A resume starts at the boundary and runs what follows
# it. Lightning itself saves before the counters are complete, and skips the evaluation after a
# resume.


class EpochLoop(_TrainingEpochLoop):
    """The loop over the batches of one epoch."""

    holdfast: TrainerFit

    @property
    def done(self) -> bool:
        """False until the resume has run what follows the restored step."""
        return not self.holdfast.resumes_inside and super().done

    def reset(self) -> None:
        """Keep the restored counters if the epoch continues. They are those after a whole step."""
        if not self.holdfast.resumes_inside:
            super().reset()
            return
        # The evaluation that follows the restored step starts from its first batch.
        self._restarting = self.val_loop._restarting = False

    def on_run_start(self, data_fetcher: Any) -> None:
        """Note the state of the random generators before a new epoch's iterator is created."""
        fit_loop = self.trainer.fit_loop
        is_new = self.trainer.current_epoch > 0 and not fit_loop.is_resuming
        if is_new and not self.restarting:
            self.holdfast.data.before_iterator(fit_loop._combined_loader)
        super().on_run_start(data_fetcher)

    def advance(self, data_fetcher: Any) -> None:
        """Train on one batch, unless the checkpoint was made after it."""
        if self.holdfast.resumes_inside:
            return
        if self.batch_progress.current.ready == 0:
            self.holdfast.data.before_first_batch()
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """End the step if the optimizer has stepped, and run what follows it."""
        place = self.holdfast.pass_resumed_place()
        if place is LoopPlace.AFTER_EVALUATION:
            return
        step = self.global_step
        has_stepped = place is LoopPlace.AFTER_STEP or step != self.holdfast.reached
        # An evaluation between two steps, while gradients accumulate, is not a place for a save.
        has_end = has_stepped and self.has_end(data_fetcher)
        if has_stepped and place is None:
            self.holdfast.end_step(step, has_end=has_end)
        super().on_advance_end(data_fetcher)
        if has_end and not super().done:
            self.holdfast.finish_end(LoopPlace.AFTER_EVALUATION)

    def has_end(self, data_fetcher: Any) -> bool:
        """Return True if an evaluation or the end of the epoch follows, the same on all ranks."""
        if self._is_training_done or self.trainer.should_stop:
            return True
        # With an interval in seconds, each rank asks its own clock.
        is_timed = self.trainer._val_check_time_interval is not None
        return not is_timed and bool(self._should_check_val_fx(data_fetcher))


class FitLoop(_FitLoop):
    """The loop over epochs."""

    holdfast: TrainerFit

    @property
    def done(self) -> bool:
        return not self.holdfast.resumes_inside and super().done

    def run(self) -> None:
        self.holdfast.before_training()
        super().run()
        self.holdfast.close()

    def setup_data(self) -> None:
        with self.holdfast.data.loading():
            super().setup_data()

    def _load_combined_loader_states(self) -> None:
        """Called by `setup_data` between the creation of the loaders and of their iterators."""
        if self.holdfast.resumed_place is None:
            super()._load_combined_loader_states()
        self.holdfast.data.before_iterator(self._combined_loader)

    def reset(self) -> None:
        super().reset()
        if self.holdfast.resumes_inside:
            # Lightning steps no plateau scheduler at the end of an epoch that was restarted.
            self._restarting = False
        elif self.holdfast.resumed_place is LoopPlace.BETWEEN_EPOCHS:
            # A new epoch begins as in an uninterrupted run: with a new iterator, and counters at 0.
            self.holdfast.pass_resumed_place()
            self._resuming_from_checkpoint = False
            for loop in (self, self.epoch_loop, self.epoch_loop.val_loop):
                loop._restarting = False

    def on_advance_start(self) -> None:
        self.holdfast.enter()
        super().on_advance_start()

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self.holdfast.finish_end(LoopPlace.BETWEEN_EPOCHS)

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Leave the loaders out of a checkpoint of Holdfast, which has those of all ranks."""
        return {} if self.holdfast.is_capturing else super().on_save_checkpoint()

    def teardown(self) -> None:
        """Release the loaders. After a stop, end the program with status 0."""
        super().teardown()
        self.holdfast.leave_if_stopped()


class CheckpointConnector(_CheckpointConnector):
    """The connector that loads `ckpt_path`."""

    holdfast: TrainerFit

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Load `checkpoint_path`, unless the run has a newer checkpoint of Holdfast."""
        super().resume_start(self.holdfast.choose_start(checkpoint_path), weights_only)


SHARED: Final = "lightning"
OF_RANK: Final = "lightning_rank"


class Stopped(_TunerExitException):
    """All ranks have agreed to stop. Lightning tears the trainer down and calls no `on_exception`.

    Lightning's tuners end a `fit` by the base class.
    """


class TrainerFit:
    """The `fit` of one trainer. Its loops, callbacks and files are under the session's control."""

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        """Take the trainer's loops over. Raises `SpecError` if they are not Lightning's own."""
        self.trainer = trainer
        self._options = dict(options)
        self.session: FrameworkSession | None = None
        # Where the loops stand when a checkpoint is made, and where a resume continues.
        self.place = LoopPlace.AFTER_STEP
        self.resumed_place: LoopPlace | None = None
        self.reached = 0
        self.is_capturing = self.has_stopped = False
        self._has_entered = False
        self._removed_at = 0
        self._trainer_state: Mapping[str, Any] | None = None
        self._generators: dict[str, Any] | None = None
        self._evaluation = contextlib.ExitStack()
        self._take_over()
        self.data, self.metrics = TrainingData(trainer), EpochMetrics(trainer)
        self.files = StrategyFiles(trainer)
        self._pass_metrics_on()

    def _take_over(self) -> None:
        trainer = self.trainer
        owners = (
            (trainer.fit_loop, _FitLoop, FitLoop),
            (trainer.fit_loop.epoch_loop, _TrainingEpochLoop, EpochLoop),
            (trainer._checkpoint_connector, _CheckpointConnector, CheckpointConnector),
        )
        for owner, expected, _ in owners:
            if type(owner) is not expected:
                raise SpecError(
                    f"Holdfast: the trainer's {type(owner).__module__}.{type(owner).__qualname__} "
                    f"is not Lightning's own {expected.__qualname__}; use `lightning.pytorch."
                    "Trainer` (not `pytorch_lightning`) without loops of your own"
                )
        for owner, _, ours in owners:
            owner.holdfast = self
            owner.__class__ = ours

    def _pass_metrics_on(self) -> None:
        """Listen where Lightning passes metrics to its loggers, even if it has none."""
        connector = self.trainer._logger_connector
        to_loggers = connector.log_metrics

        def log_metrics(metrics: Any, step: int | None = None) -> None:
            to_loggers(metrics, step)
            self.log(metrics)

        connector.log_metrics = log_metrics

    # --- begin ----------------------------------------------------------------------------

    def choose_start(self, checkpoint_path: Any) -> Any:
        """Return the user's `ckpt_path`, or None if the run already has a checkpoint."""
        if checkpoint_path is None or self.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint_path
        if self.session is not None:
            return None if self.session.resumed_from is not None else checkpoint_path
        # The file is not even read, because it may be gone since the first attempt.
        has_own = self.trainer.is_global_zero and has_checkpoint(self._options["directory"])
        return None if self.trainer.strategy.broadcast(has_own) else checkpoint_path

    def open(self) -> None:
        """Open the session, which restores the newest checkpoint.

        The model is wrapped by now, and the optimizers exist. Raises `CheckpointError` if the
        checkpoint has no state of a Lightning trainer.
        """
        trainer, shared = self.trainer, SharedState(self)
        # The session leaves an excluded object of each rank out at another number of ranks only.
        exclude = (f"extra.{OF_RANK}", *self._options["exclude"])
        session = FrameworkSession(
            trainer.model,
            list(trainer.optimizers),
            [config.scheduler for config in trainer.lr_scheduler_configs],
            extra={SHARED: shared},
            per_rank={OF_RANK: RankState(self)},
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
            **{**self._options, "exclude": exclude},
        )
        if session.step and not shared.is_restored:
            error = CheckpointError(
                f"{session.resumed_from}: this checkpoint was not made by Holdfast's callback for "
                "Lightning, so the trainer's epoch and position in the data are unknown. Give this "
                "program its own run, or load only the weights, in the program"
            )
            session.__exit__(CheckpointError, error, None)
            raise error
        self.files.open(session)
        if session.resumed_from is not None:
            self._generators = rng.capture()
            # A `ckpt_path` that was loaded although the run's checkpoint was only in the mirror.
            trainer._checkpoint_connector._loaded_checkpoint = {}
        self.session = session

    def resume_at(self, place: LoopPlace, trainer_state: Mapping[str, Any]) -> None:
        """Continue the loops at `place`. Their counters are restored already."""
        self.place = self.resumed_place = place
        self._trainer_state = trainer_state
        if self.resumes_inside:
            self.trainer.should_stop = trainer_state["should_stop"]
            self.data.resume_inside()

    @property
    def resumes_inside(self) -> bool:
        """True until the first thing has run that follows the restored step in its epoch."""
        return self.resumed_place in (LoopPlace.AFTER_STEP, LoopPlace.AFTER_EVALUATION)

    def pass_resumed_place(self) -> LoopPlace | None:
        """Return where the resume continues, once."""
        place, self.resumed_place = self.resumed_place, None
        return place

    def before_training(self) -> None:
        """Prepare for the loops. Signals are left to the agent, or to the session without one.

        Lightning's own handler runs a collective inside the handler, and ends training at different
        places on different ranks.
        """
        self.trainer._signal_connector.teardown()
        self.reached = self.trainer.global_step
        if self.resumed_place is not None or self.data.stream.is_waiting:
            # `configure_optimizers` may have asked for the number of steps, which creates the
            # loaders before the position is known.
            self.trainer.fit_loop._combined_loader = None

    def enter(self) -> None:
        """Before the first epoch of this process, or the rest of one, begin the session's loop."""
        session = self._opened
        if self._has_entered:
            return
        self._has_entered = True
        if self.resumes_inside and self._trainer_state is not None:
            # `GradientAccumulationScheduler` refuses another number when training starts.
            accumulated = self._trainer_state["accumulate_grad_batches"]
            self.trainer.accumulate_grad_batches = accumulated
        self._restore_loaders()
        self.metrics.restore_modules_again()
        if self._generators is not None:
            # Numbers that were drawn while loaders were created again.
            rng.restore(self._generators)
        loop = self.trainer.fit_loop
        has_end = self.place is LoopPlace.AFTER_STEP and self.resumes_inside
        has_end = has_end and loop.epoch_loop.has_end(loop._data_fetcher)
        if session.begin(self._steps_in_all(session.step), has_end=has_end):
            self._stop()

    # --- steps ----------------------------------------------------------------------------

    def end_step(self, global_step: int, *, has_end: bool) -> None:
        """End one optimizer step. Raises `Stopped` if all ranks have agreed to stop."""
        self.place, self.reached = LoopPlace.AFTER_STEP, global_step
        session = self._opened
        if session.boundary(has_end=has_end):
            self._stop()
        if session.committed_step > self._removed_at:
            self._removed_at = session.committed_step
            self.files.remove(session.committed_step)

    def finish_end(self, place: LoopPlace) -> None:
        """End the evaluation, or the end of the epoch, that follows a step."""
        self.place = place
        self._opened.finish_end()

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Pass on what Lightning passes to its loggers."""
        if self.session is not None and metrics:
            self.session.log(**convert_tensors_to_scalars(dict(metrics)))

    def begin_evaluation(self) -> None:
        if self.session is not None:
            self._evaluation.enter_context(self.session.phase("eval"))

    def finish_evaluation(self) -> None:
        self._evaluation.close()

    # --- end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit the last checkpoint and release the session. Raises `SaveError`."""
        session, self.session = self.session, None
        if session is not None:
            session.close(may_end_early=False)
            self.files.close()

    def abandon(self, error: BaseException) -> None:
        """Release the session after an error. It saves nothing, because ranks may differ."""
        session, self.session = self.session, None
        if session is not None:
            session.__exit__(type(error), error, error.__traceback__)

    def leave_if_stopped(self) -> None:
        """End the program, so that no code after `fit` runs with a model that is half trained."""
        if self.has_stopped:
            raise SystemExit(0)

    def _stop(self) -> None:
        self.has_stopped = True
        raise Stopped

    @property
    def _opened(self) -> FrameworkSession:
        assert self.session is not None, "the loops run before on_fit_start"
        return self.session

    def _restore_loaders(self) -> None:
        """Restore when loaders were created. Their creation in this process has changed it."""
        if self._trainer_state is None:
            return
        fit_loop = self.trainer.fit_loop
        evaluation = fit_loop.epoch_loop.val_loop
        fit_loop._last_train_dl_reload_epoch = self._trainer_state["reloaded_train"]
        evaluation._last_val_dl_reload_epoch = self._trainer_state["reloaded_evaluation"]
        if not self._trainer_state["has_evaluation_data"]:
            evaluation._combined_loader = None

    def _steps_in_all(self, step: int) -> int | None:
        """Return the number of session steps up to the end of training, or None if unknown."""
        trainer = self.trainer
        if not trainer.lightning_module.automatic_optimization:
            return None
        if any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks):
            return None
        total = trainer.estimated_stepping_batches
        is_known = not math.isinf(total) and total >= 0
        return int(total) - trainer.global_step + step if is_known else None


def has_checkpoint(directory: str | Path | None) -> bool:
    """Return True if the run has committed a checkpoint, or was forked from one."""
    given = os.environ.get(environment.RUN_DIRECTORY) or directory
    run = RunPaths(choose_directory(given, os.environ, program_stem()))
    record = read_document(RunRecord, run.spec)
    if record is not None and record.forked_path:
        return True
    excluded = excluded_checkpoints(load_events(run))
    return any(
        (each / MANIFEST).exists() for each in run.list_checkpoints() if each.name not in excluded
    )
