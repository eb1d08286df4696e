"""`Trainer`: a `transformers.Trainer` that Holdfast saves, stops and resumes.

It also works as a mixin in front of a subclass: `class MyTrainer(Trainer, SFTTrainer)`. The session
is made when the trainer has prepared its model, and before it computes where its epochs continue:

1. `_init_training_state` prepares model and optimizer, makes the session, and returns the place.
2. `_prepare_for_training`, which the trainer calls next, returns what was prepared.
3. `_run_epoch` passes on that the training was resumed, so that the trainer skips batches.
4. `_maybe_log_save_evaluate` ends the step: after its logs, and before its evaluation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import transformers
from accelerate.utils import save_fsdp_model
from torch.distributed.fsdp import StateDictType
from transformers import TrainerCallback

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.frameworks.streamed import EVALUATED
from holdfast.trainer.frameworks.transformers import checks, fetching, streams
from holdfast.trainer.frameworks.transformers.progress import NOTHING, Todo
from holdfast.trainer.frameworks.transformers.run import RESUMED, TrainerRun
from holdfast.trainer.streams.convert import is_streaming_dataset

# The events of a trainer's loop that its run hears of.
#
# A callback would be called at every event of a step, even at those that it ignores. So the run
# takes the place of a few methods of the trainer's callback handler. It hears of an event before
# the trainer's callbacks, which then see restored random generators and the logs as they were.


def listen(handler: Any, run: Any) -> None:
    """Tell `run` of the events of a `CallbackHandler` from now on."""

    def log(_: Any, __: Any, ___: Any, logs: Any = None, **____: Any) -> None:
        run.log(logs or {})

    def beat(*_: Any, **__: Any) -> None:
        if run.session is not None:
            run.session.beat()

    _hear(handler, "on_train_begin", lambda *_, **__: run.begin_training())
    _hear(handler, "on_epoch_begin", lambda *_, **__: run.restore_generators())
    _hear(handler, "on_prediction_step", beat)
    _hear(handler, "on_log", log)


def _hear(handler: Any, event: str, hear: Callable[..., None]) -> None:
    tell = getattr(handler, event)

    def both(*given: Any, **more: Any) -> Any:
        hear(*given, **more)
        return tell(*given, **more)

    setattr(handler, event, both)


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` whose training state is Holdfast's.

    `train` resumes automatically from the run's newest checkpoint. Once all ranks agree to stop,
    it commits a checkpoint and ends the program with exit status 0, so that nothing after it uses
    a model that is not trained to its end. The directories `checkpoint-N` keep the model and no
    training state.

    `session_options` are more arguments of the `Session`, such as `interval` or `directory`.

    `kept_attributes` are names of the trainer's attributes that a resume restores on each rank, as
    the sums since the last log that a subclass adds: numbers, text, tensors, and lists and
    dictionaries of them. Those of TRL and of Sentence Transformers are known.
    """

    session_options: ClassVar[Mapping[str, Any]] = {}
    kept_attributes: ClassVar[Sequence[str]] = ()
    _holdfast: TrainerRun

    def __init__(self, *arguments: Any, **more: Any) -> None:
        """Takes the arguments of `transformers.Trainer`."""
        super().__init__(*arguments, **more)
        _connect(self)

    @property
    def session(self) -> FrameworkSession | None:
        return self._holdfast.session

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Trains to the end, from the run's newest checkpoint if it has one.

        `resume_from_checkpoint` names a directory of Transformers to begin with, or is True for
        the last one in `output_dir`. It counts only while the run has no checkpoint. Raises
        `SpecError` for what a resume cannot continue, and the errors of `Session`.
        """
        run = self._holdfast
        run.start(resume_from_checkpoint, trial)
        try:
            output = super().train(None, trial, ignore_keys_for_eval)
        except BaseException as error:
            run.abandon(error)
            raise
        run.close()
        return output

    # --- the beginning of the loop --------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        checks.check_loader(dataloader)
        self._holdfast.take_loader(dataloader)
        return super().set_initial_training_values(*streams.counted(args, dataloader))

    def _get_dataloader(self, dataset: Any, *given: Any, **more: Any) -> Any:
        if not is_streaming_dataset(dataset):
            return super()._get_dataloader(dataset, *given, **more)
        if dataset is self.train_dataset and not more.get("is_training"):
            raise SpecError(EVALUATED)
        with streams.undivided_by(self.accelerator):
            return super()._get_dataloader(dataset, *given, **more)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        run, counts = self._holdfast, (max_steps, num_update_steps_per_epoch, num_train_epochs)
        super()._init_training_state(*counts, None, trial)
        run.prepared = super()._prepare_for_training(max_steps, run.loader, None)
        run.open(max_steps, num_update_steps_per_epoch)
        path = run.foreign
        if path is not None:
            self._load_from_checkpoint(path)
            epoch, batches = super()._init_training_state(*counts, path, trial)
            self._load_optimizer_and_scheduler(path)
            self._load_scaler(path)
            run.begin_at(path, epoch, batches // self.args.gradient_accumulation_steps)
        return run.place(num_train_epochs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        prepared, self._holdfast.prepared = self._holdfast.prepared, None
        return prepared

    def _load_rng_state(self, checkpoint: str | None) -> None:
        run = self._holdfast
        if checkpoint != RESUMED:
            super()._load_rng_state(checkpoint)
        elif not run.fetches.fetched:
            run.restore_generators()

    # --- steps and epochs -----------------------------------------------------------------

    def _run_epoch(self, **given: Any) -> None:
        run = self._holdfast
        fetching.set_epoch(given["train_dataloader"], given["epoch"])
        given |= run.begin_epoch(given)
        if run.resumed is not None:
            if any(todo := run.take_todo()):
                names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
                self._evaluate_and_save(todo, self._tr_loss, None, *(given[n] for n in names))
            given |= run.continue_epoch()
        with run.at_its_place():
            super()._run_epoch(**given)
        run.end_epoch()

    def get_batch_samples(self, *arguments: Any, **more: Any) -> Any:
        if self._holdfast.fetches.is_new:
            fetch = super().get_batch_samples
            return self._holdfast.fetch_first(lambda: fetch(*arguments, **more))
        return super().get_batch_samples(*arguments, **more)

    def training_step(self, *arguments: Any, **more: Any) -> Any:
        loss = super().training_step(*arguments, **more)
        self._holdfast.add_loss(loss)
        return loss

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, end the step, then evaluate and save. After the last step, end the epoch."""
        run, control, todo = self._holdfast, self.control, NOTHING
        if control.should_evaluate or control.should_save:
            todo = Todo(control.should_evaluate, control.should_save)
            control.should_evaluate = control.should_save = False
        is_step = run.session is not None and self.state.global_step > run.session.step
        told, rest = run.progress.told, (model, trial, epoch, ignore_keys_for_eval, start_time)
        if is_step:
            run.observe()
            told.grad_norm, told.learning_rate = grad_norm, learning_rate
        super()._maybe_log_save_evaluate(tr_loss, told.grad_norm, *rest, told.learning_rate)
        if is_step:
            run.complete_step(todo)
        if todo is not NOTHING:
            self._evaluate_and_save(todo, tr_loss, told.grad_norm, *rest)
        if not is_step:
            run.complete_epoch()

    def _evaluate_and_save(self, todo: Todo, *arguments: Any) -> None:
        """Do what `todo` says, with the trainer's own method."""
        self.control.should_evaluate, self.control.should_save = todo
        super()._maybe_log_save_evaluate(*arguments)
        self._holdfast.complete_todo()

    def _evaluate(self, trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> Any:
        # The trainer calls it in this way only for `eval_on_start`, which has already run.
        if skip_scheduler and self._holdfast.resumed == RESUMED:
            return {}
        return super()._evaluate(trial, ignore_keys, skip_scheduler)

    def evaluate(self, *arguments: Any, **more: Any) -> Any:
        with self._holdfast.phase("eval"):
            return super().evaluate(*arguments, **more)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        run = self._holdfast
        run.finish()
        # The result is that of the whole run, not of this launch.
        self._initial_global_step = run.progress.first_step
        return super()._finalize_training(
            trial, num_train_samples, start_time - run.progress.earlier_s
        )

    # --- directories of the trainer -------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the model to `checkpoint-N`, and request a checkpoint of Holdfast."""
        run, limit = self._holdfast, self.args.save_total_limit
        # Older directories are deleted when the checkpoint is committed.
        self.args.save_total_limit = None
        try:
            with run.phase("save"), run.writing_directory():
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        run.request_save()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save no more than a model of FSDP that is loaded again: the session saves the rest."""
        if not self.is_fsdp_enabled:
            return
        plugin = self.accelerator.state.fsdp_plugin
        is_sharded = plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
        # A whole model is in the directory already, but the best one is read from another file.
        if is_sharded or self.args.load_best_model_at_end:
            save_fsdp_model(plugin, self.accelerator, self.model, output_dir, adapter_only=True)

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the session saves the scaler."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the session saves the random states."""


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """A `transformers.Seq2SeqTrainer` whose training state is Holdfast's."""


def attach(trainer: Any) -> None:
    """Make a trainer that exists already, of any subclass, one of Holdfast.

    Raises `SpecError` if it already is one.
    """
    kind = type(trainer)
    if isinstance(trainer, Trainer):
        raise SpecError(
            f"this {kind.__name__} is already under Holdfast: registered twice. Use one of "
            "holdfast's Trainer, one HoldfastCallback, and attach(trainer)"
        )
    if not isinstance(trainer, transformers.Trainer):
        raise SpecError(f"attach(trainer): expected a transformers.Trainer, not a {kind.__name__}")
    trainer.__class__ = type(kind.__name__, (Trainer, kind), {"__module__": kind.__module__})
    _connect(trainer)


def _connect(trainer: Any) -> None:
    trainer._holdfast = TrainerRun(trainer)
    listen(trainer.callback_handler, trainer._holdfast)


class HoldfastCallback(TrainerCallback):
    """Turns the trainer that it is given to into one of Holdfast, as `attach` does.

    A callback alone could not resume a training, so it changes the class of its trainer when that
    is made. Pass it as `callbacks=[HoldfastCallback()]`.
    """

    def on_init_end(self, *_: Any, **__: Any) -> None:
        attach(self._find_trainer())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if not isinstance(self._find_trainer(), Trainer):
            raise SpecError(
                "HoldfastCallback was added to a trainer that was already made. Pass it to the "
                "Trainer as callbacks=[HoldfastCallback()], or call attach(trainer) instead"
            )

    def _find_trainer(self) -> Any:
        """Return the trainer whose event this is: its method called ours. No event names it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found = frame.f_locals.get("self")
            if isinstance(found, transformers.Trainer):
                return found
            frame = frame.f_back
        raise SpecError(
            "HoldfastCallback found no transformers.Trainer that called it; pass it to one as "
            "callbacks=[HoldfastCallback()]"
        )
