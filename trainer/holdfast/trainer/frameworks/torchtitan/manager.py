"""torchtitan's checkpoint manager with Holdfast's checkpoints, stops and resumes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer import CheckpointManager as Stock
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.metrics import BaseLogger
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from holdfast.contracts.disk.paths import MANIFEST
from holdfast.contracts.errors import CheckpointError, SpecError
from holdfast.contracts.records.topology import FIXED, GLOBAL_BATCHES
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.frameworks.torchtitan import settings, streamed
from holdfast.trainer.frameworks.torchtitan.loader import TokenDataLoader
from holdfast.trainer.loading.checkpoint import load_checkpoint
from holdfast.trainer.state.objects import RankLimited
from holdfast.trainer.state.torchdata_loaders import check_workers, prepare_workers
from holdfast.trainer.streams.convert import why_inexact

# What a checkpoint of a torchtitan trainer contains beside weights, optimizers and schedulers.

FORMAT: Final = 1
# Datasets that read others.
DEPTH_MAX: Final = 8
TOKENS: Final = "ntokens_seen"


class TrainerState(RankLimited):
    """The state of a torchtitan `Trainer`: its step, its tokens and its pending validation.

    `saved` describes the launch that saved the restored checkpoint, and is None without one.
    `keeps_place` says that each rank keeps the place of its loader.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.keeps_place = False
        # True between the end of a step and the end of the validation that follows it.
        self.awaits_validation = False
        self.saved: Mapping[str, Any] | None = None

    @property
    def batch_parts(self) -> int:
        """The data-parallel degree: how many ranks get different samples."""
        dims = self._trainer.parallel_dims
        return int(dims.get_mesh("batch").size()) if dims.dp_enabled else 1

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step on all ranks together."""
        trainer = self._trainer
        local = trainer.config.training.local_batch_size * trainer.gradient_accumulation_steps
        return int(local) * self.batch_parts

    def state_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "trainer": dict(self._trainer.state_dict()),
            "token_parts": self._token_parts,
            "batch_parts": self.batch_parts,
            "global_batch": self.global_batch,
            "awaits_validation": self.awaits_validation,
        }

    def rank_limits(self) -> dict[str, Any]:
        training = self._trainer.config.training
        if self.keeps_place:
            return {
                FIXED: "the place of its data loader is kept by rank; for a new run, use a stream "
                "or TokenDataLoader, which continue at every data-parallel degree"
            }
        if training.global_batch_size < 0:
            return {
                FIXED: "the global batch follows from the number of ranks; for a new run, set "
                f"training.global_batch_size={self.global_batch}"
            }
        return {GLOBAL_BATCHES: [self.global_batch // int(training.local_batch_size)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the trainer's counters. Raises `CheckpointError` for a newer format."""
        if state["format"] > FORMAT:
            raise CheckpointError(
                f"this state of a torchtitan trainer has format {state['format']}; this version "
                f"of Holdfast reads {FORMAT}. Install the version that saved it, or a newer one"
            )
        own = dict(state["trainer"])
        if TOKENS in own:
            # Each rank counts its own tokens, and torchtitan logs the sum over the ranks.
            own[TOKENS] = own[TOKENS] * state["token_parts"] // self._token_parts
        self._trainer.load_state_dict(own)
        self.awaits_validation = state["awaits_validation"]
        self.saved = state

    @property
    def _token_parts(self) -> int:
        mesh = self._trainer.parallel_dims.get_optional_mesh("loss")
        return 1 if mesh is None else int(mesh.size())


class LoaderState:
    """This rank's state of a loader of torchtitan, which counts only at the same parallelism."""

    is_of_one_size = True

    def __init__(self, loader: BaseDataLoader) -> None:
        """Raises `SpecError` for a loader whose own state does not determine its samples."""
        self._loader = loader
        for stream in _streams_in(loader, 0):
            if why := why_inexact(stream):
                raise SpecError(
                    f"the {type(loader).__name__} reads a stream that cannot continue after {why}. "
                    "Do the work of map and filter in sample_processor, and shuffle the data "
                    "before the run; or use a dataset with an index, or TokenDataLoader"
                )
        prepare_workers(loader)
        self.was_restored = False
        # torchtitan pickles the state of torchdata's loader, which is plain data itself.
        kind = type(loader)
        is_pickled = isinstance(loader, ParallelAwareDataloader) and (
            kind.state_dict is ParallelAwareDataloader.state_dict
            and kind.load_state_dict is ParallelAwareDataloader.load_state_dict
        )
        self._kind: Any = StatefulDataLoader if is_pickled else kind

    def state_dict(self) -> Any:
        return self._kind.state_dict(self._loader)

    def load_state_dict(self, state: Any) -> None:
        check_workers(self._loader, state)
        self._kind.load_state_dict(self._loader, state)
        self.was_restored = True

    def create_iterator(self) -> None:
        """Let the loader create its iterator, which draws a random number, if it has a state.

        An uninterrupted run draws none where a resumed one begins.
        """
        if self.was_restored and isinstance(self._loader, StatefulDataLoader):
            StatefulDataLoader.state_dict(self._loader)


def _streams_in(owner: Any, depth: int) -> Iterator[Any]:
    """Yield the streams of `datasets` that a loader or a dataset of torchtitan reads."""
    for value in vars(owner).values():
        for item in value if isinstance(value, list) else [value]:
            if hasattr(item, "_ex_iterable"):
                yield item
            elif isinstance(item, IterableDataset) and depth < DEPTH_MAX:
                yield from _streams_in(item, depth + 1)


# torchtitan's own checkpoint manager, for checkpoints that torchtitan made and for its export.


def stock_manager(config: Any, parts: Mapping[str, Any]) -> Any:
    """Return torchtitan's manager with the keys of `config`. It keeps all checkpoints.

    `parts` are the arguments with which the trainer creates a manager.
    """
    names = [field.name for field in dataclasses.fields(BaseCheckpointManager.Config)]
    own = Stock.Config(**{name: getattr(config, name) for name in names})
    return Stock(own, **{**parts, "states": dict(parts["states"])})


# The metrics and the validation of a torchtitan trainer, seen by the session.

LOSS: Final = "loss_metrics/global_avg_loss"


class SessionLogger(BaseLogger):
    """Passes what the trainer logs on to its own loggers, and to the run's metrics."""

    def __init__(self, inner: BaseLogger, session: FrameworkSession) -> None:
        self._inner, self._session = inner, session

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._inner.log(metrics, step)
        values = {
            name: float(value) for name, value in metrics.items() if isinstance(value, int | float)
        }
        if LOSS in values:
            self._session.observe(values[LOSS])
        self._session.log(**values)

    def close(self) -> None:
        self._inner.close()


def log_to(session: FrameworkSession, metrics_processor: Any) -> None:
    """Listen where torchtitan passes metrics to its loggers, even if it has none."""
    metrics_processor.logger = SessionLogger(metrics_processor.logger, session)


def watch_validation(session: FrameworkSession, trainer: Any, complete: Callable[[], None]) -> None:
    """Let each validation be a phase of the session, and call `complete` after it."""
    if not trainer.config.validator.enable:
        return
    inner = trainer.validator.validate

    def validate(*args: Any, **kwargs: Any) -> None:
        with session.phase("eval"):
            inner(*args, **kwargs)
        complete()

    trainer.validator.validate = validate


TRAINER: Final = "torchtitan"
LOADER: Final = "dataloader"


class CheckpointManager(BaseCheckpointManager):
    """Makes a torchtitan `Trainer` resume automatically, and stop on all ranks after the same step.

    The session opens when the trainer loads, and each save of the trainer ends a step. When the
    ranks have agreed to stop, the process ends there with status 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's keys, and those of a session. Raises `SpecError` for a key that is refused.

        `docs/torchtitan.md` lists the effect of each key.
        """

        enable: bool = True
        keep_latest_k: int = 0
        last_save_model_only: bool = False
        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"

        directory: str | None = None
        """The run's folder when there is no agent of Holdfast."""

        snapshots: str = "auto"
        """Steps between snapshots, "auto" or "off". A key in the run spec has precedence."""

        best: str = ""
        """A logged metric and "min" or "max", such as "validation_metrics/loss min"."""

        def __post_init__(self) -> None:
            # With slots, the class is another one than that of a `super()` without arguments.
            BaseCheckpointManager.Config.__post_init__(self)
            if self.enable:
                settings.check(self)

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Takes what the trainer gives. Raises `SpecError` for what cannot be saved here."""
        self.enable, self.save_future = config.enable, None
        self.session: FrameworkSession | None = None
        self._has_finished = False
        if not self.enable:
            return
        settings.check(config)
        self._config = config
        self._parts: dict[str, Any] = {
            "dataloader": dataloader,
            "model_parts": model_parts,
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            "states": states,
            "sd_adapter": sd_adapter,
            "base_folder": base_folder,
        }
        self._trainer = _trainer_of(states)
        if isinstance(dataloader, TokenDataLoader) and LOADER in config.exclude_from_loading:
            raise SpecError(
                f"exclude_from_loading={config.exclude_from_loading}: the data of a "
                f"{type(dataloader).__name__} follows from the step. For another order, change its "
                "seed"
            )
        self._state = TrainerState(self._trainer)
        self._stream = streamed.stream_of(dataloader)
        ordered = isinstance(dataloader, TokenDataLoader) or dataloader is None
        ordered = ordered or self._stream is not None
        self._loader = None if ordered else LoaderState(dataloader)
        self._state.keeps_place = not ordered and LOADER not in self._config.exclude_from_loading

    # --- begin ----------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        """Open the session, which resumes, and run the validation that was interrupted.

        Raises `SpecError` for a step other than -1 or if the loader cannot continue, and
        `CheckpointError` for a checkpoint of another framework. Ends the process if it must stop.
        """
        if step != -1:
            raise SpecError(
                f"load(step={step}): a run continues from its newest checkpoint. To go back, use "
                "`holdfast fork`"
            )
        trainer, state = self._trainer, self._state
        session = self.session = self._open()
        is_loaded = session.resumed_from is not None
        if is_loaded:
            self._check_resumed(session)
        else:
            is_loaded = self._load_first()
            session = self._opened
        self._follow(session)
        if session.begin(trainer.config.training.steps, has_end=state.awaits_validation):
            self._leave()
        if state.awaits_validation and trainer.config.validator.enable:
            trainer.validator.validate(trainer.model_parts, trainer.step)
        elif session.step:
            # The former launch may have been interrupted in the export of the last model.
            self._complete_step()
        return is_loaded

    def _open(self, begins_at: int = 0) -> FrameworkSession:
        config, parts = self._config, self._parts
        first, loader = config.initial_load_path, parts["dataloader"]
        is_continued = is_of_holdfast(first) and not config.initial_load_model_only
        is_ordered = isinstance(loader, TokenDataLoader)
        return FrameworkSession(
            parts["model_parts"],
            list(parts["optimizers"]),
            parts["lr_schedulers"],
            extra={TRAINER: self._state},
            per_rank={} if self._loader is None else {LOADER: self._loader},
            seed=loader.seed if is_ordered else self._trainer.config.debug.seed or 0,
            interval=settings.given(config, "interval"),
            directory=config.directory,
            best=settings.best_of(config),
            snapshots=settings.given(config, "snapshots"),
            exclude=settings.excluded(config),
            start_from=first if is_continued else None,
            begins_at=begins_at,
        )

    def _load_first(self) -> bool:
        """Load where a run without a checkpoint begins. Return True if there was something."""
        config, parts = self._config, self._parts
        if is_of_holdfast(config.initial_load_path):
            load_checkpoint(str(config.initial_load_path), parts["model_parts"])
            return True
        is_loaded = bool(stock_manager(config, parts).load())
        if self._trainer.step:
            if self._stream is not None and LOADER not in config.exclude_from_loading:
                self._refuse(
                    SpecError(
                        f"torchtitan's checkpoint of step {self._trainer.step} has the place of "
                        "its stream by rank, which a run that continues at every degree cannot "
                        'use. With exclude_from_loading=["dataloader"], the data begins at its '
                        "start"
                    )
                )
            # A session knows from its start how many steps are complete.
            self._opened.abandon()
            self.session = self._open(begins_at=self._trainer.step)
        return is_loaded

    def _check_resumed(self, session: FrameworkSession) -> None:
        """Refuse a checkpoint of another framework, and a loader that cannot continue."""
        saved, state = self._state.saved, self._state
        if saved is None:
            self._refuse(
                CheckpointError(
                    f"{session.resumed_from} was not saved by a torchtitan trainer, so its state "
                    "is unknown. Submit this program as a new run"
                )
            )
            return
        then, now = saved["batch_parts"], state.batch_parts
        if self._loader is None:
            is_implicit = self._trainer.config.training.global_batch_size < 0
            if is_implicit and saved["global_batch"] != state.global_batch:
                self._refuse(
                    SpecError(
                        f"the global batch was {saved['global_batch']} samples at data-parallel "
                        f"degree {then}, and would be {state.global_batch} at degree {now}; set "
                        f"training.global_batch_size={saved['global_batch']}"
                    )
                )
        elif LOADER in self._config.exclude_from_loading and not self._loader.was_restored:
            logger.warning("Holdfast: the data loader begins afresh (exclude_from_loading)")
        elif then != now or not self._loader.was_restored:
            kind = type(self._parts["dataloader"]).__name__
            self._refuse(
                SpecError(
                    f"the {kind} was saved at data-parallel degree {then} and cannot continue at "
                    f"{now} on {session.world_size} ranks: torchtitan keeps its state by rank. Run "
                    "with the former parallelism. For a new run at any degree, let the loader of "
                    "its DatasetConfig return a stream, such as dataset.to_iterable_dataset("
                    "num_shards=64), or use holdfast.trainer.frameworks.torchtitan.TokenDataLoader"
                )
            )

    def _refuse(self, error: SpecError | CheckpointError) -> None:
        """Release the session, which has changed no checkpoint, and raise `error`."""
        session, self.session = self._opened, None
        with session:
            raise error

    def _follow(self, session: FrameworkSession) -> None:
        """Let the trainer's loader, metrics and validation work with the session."""
        trainer, loader = self._trainer, self._parts["dataloader"]
        if isinstance(loader, TokenDataLoader):
            loader.follow(session, self._state.global_batch, trainer.config.training.steps)
        elif self._stream is not None:
            self._stream.open(session, LOADER, trainer.gradient_accumulation_steps)
            trainer.dataloader = self._stream
        elif self._loader is not None:
            self._loader.create_iterator()
        log_to(session, trainer.metrics_processor)
        watch_validation(session, trainer, self._complete_step)

    # --- steps ----------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """End a step. Return True if a checkpoint of it exists, or is being written.

        Ends the process if the ranks have agreed to stop. Raises `SpecError` if the trainer left
        out a step.
        """
        session, state = self._opened, self._state
        if curr_step != session.step + 1:
            raise SpecError(
                f"save(curr_step={curr_step}) after step {session.step}; expected one call after "
                "each step of the trainer"
            )
        state.awaits_validation = bool(
            self._trainer.config.validator.enable
            and self._trainer.validator.should_validate(curr_step)
        )
        if curr_step == 1 and self._config.enable_first_step_checkpoint:
            session.checkpoint(wait=True)
        must_leave = session.boundary(has_end=state.awaits_validation)
        if must_leave and (state.awaits_validation or not last_step):
            self._leave()
        if not state.awaits_validation:
            self._complete_step()
        return session.current_checkpoint is not None

    def _complete_step(self) -> None:
        """Complete the validation of a step. After the last step, commit and export the model."""
        session, state = self._opened, self._state
        if state.awaits_validation:
            state.awaits_validation = False
            session.finish_end()
        if self._has_finished or session.step < self._trainer.config.training.steps:
            return
        self._has_finished = True
        session.finish()
        if self._config.last_save_model_only:
            with session.phase("save"):
                stock_manager(self._config, self._parts).save(session.step, last_step=True)

    def _leave(self) -> None:
        """End this process after all ranks have agreed to stop. The exit status is 0."""
        logger.info(f"Holdfast: stopped after step {self._trainer.step}; the same command resumes")
        self._trainer.close()
        # `Trainer.train` would return after SystemExit(0), and the program would continue.
        raise SystemExit

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save has copied the state before the step ended."""

    def _wait_for_saving(self) -> None:
        """Do nothing: the session waits for its own saves."""

    # --- end ------------------------------------------------------------------------------

    def _close(self) -> None:
        """Commit the last checkpoint and release the session. After an error, save nothing."""
        session, self.session = self.session, None
        if session is None:
            return
        # torchtitan closes the trainer within the handler of the error that ended training.
        kind, error, trace = sys.exc_info()
        if error is not None:
            session.__exit__(kind, error, trace)
        else:
            session.close(may_end_early=False)

    @property
    def _opened(self) -> FrameworkSession:
        if self.session is None:
            raise SpecError(
                "save() before load(); expected a torchtitan Trainer, which loads before its loop"
            )
        return self.session


def is_of_holdfast(path: str | None) -> bool:
    """Return True if `path` is the directory of a committed checkpoint of Holdfast."""
    return path is not None and (Path(path) / MANIFEST).exists()


def _trainer_of(states: dict[str, Any]) -> Trainer:
    """Return the trainer among `states`. Raises `SpecError` if it cannot be supported."""
    trainer = states.get("train_state")
    if not isinstance(trainer, Trainer):
        raise SpecError(
            f"states['train_state'] is a {type(trainer).__name__}; expected a torchtitan Trainer. "
            "For a loop of your own, use holdfast.trainer.Session"
        )
    if trainer.parallel_dims.pp_enabled:
        raise SpecError(
            "parallelism.pipeline_parallel_degree="
            f"{trainer.config.parallelism.pipeline_parallel_degree}: this manager does not support "
            "pipeline parallelism; expected 1"
        )
    return trainer
