"""Lightning's `Fabric` with Holdfast's checkpoints, stops and resumes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from lightning.fabric import Fabric as LightningFabric
from lightning.fabric.connector import _is_using_cli
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.wrappers import _unwrap_objects
from torch import nn
from torch.distributed import is_torchelastic_launched
from torch.optim.lr_scheduler import LRScheduler

from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks.lightning import global_batch
from holdfast.trainer.frameworks.lightning.callback import torchrun_size
from holdfast.trainer.frameworks.program_loop import order, training
from holdfast.trainer.frameworks.program_loop.loader import (
    ResumedEpoch,
    WrappedLoader,
    wrap_sampler,
)
from holdfast.trainer.frameworks.program_loop.progress import LoopProgress
from holdfast.trainer.frameworks.program_loop.streamed import StreamedLoader
from holdfast.trainer.frameworks.session import FrameworkSession
from holdfast.trainer.frameworks.streamed import has_shards, is_stream, stream_arguments
from holdfast.trainer.session.session import Session
from holdfast.trainer.state.objects import RankLimited

PRECISION: Final = "precision"
STRATEGIES: Final = (DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy)


def fabric_session(
    fabric: Any,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Session:
    """Return a `Session` over what `fabric.setup` returned, and resume.

    It takes Fabric's wrappers off, and adds the state of Fabric's precision, such as a loss scale.
    `options` are further arguments of `Session`. Raises `SpecError` for a strategy that is not
    supported, and what `Session` raises.
    """
    check_strategy(fabric.strategy)
    parts = dict(extra or {})
    if PRECISION in parts:
        raise SpecError(f"extra[{PRECISION!r}]: Holdfast uses this name for Fabric's precision")
    parts |= precision_of(fabric)
    return Session(_unwrapped(model), _unwrapped(optimizer), scheduler, extra=parts, **options)


def check_strategy(strategy: Any) -> None:
    """Raise `SpecError` for a strategy whose state Holdfast does not save here."""
    if not isinstance(strategy, STRATEGIES):
        raise SpecError(
            f"the strategy {type(strategy).__name__} is not supported; use one of "
            f"{', '.join(kind.__name__ for kind in STRATEGIES)}"
        )


def precision_of(fabric: Any) -> dict[str, Any]:
    """Return Fabric's precision by its name in a session, if it has a state such as a scale."""
    precision = fabric.strategy.precision
    return {PRECISION: precision} if precision.state_dict() else {}


def _unwrapped(given: Any) -> Any:
    if isinstance(given, Sequence):
        return [_unwrap_objects(each) for each in given]
    return None if given is None else _unwrap_objects(given)


# The learning rate schedulers of a program.
#
# Fabric does not prepare schedulers, so a program that uses them does not name them to it. A
# missing one would start again after a resume. So each scheduler is noted when it is created.


class _Created:
    """The schedulers that exist, in the order of their creation."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[LRScheduler]] = []
        self.count = 0

    def note(self, scheduler: LRScheduler) -> None:
        self.count += 1
        self._found.append(weakref.ref(scheduler))

    def alive(self) -> list[LRScheduler]:
        alive = [one for one in (found() for found in self._found) if one is not None]
        self._found = [weakref.ref(one) for one in alive]
        return alive


_created = _Created()


def watch_schedulers() -> None:
    """Note schedulers from now on. Their class gets a `__new__`, which all kinds of them use."""
    if "__new__" in vars(LRScheduler):
        return

    def create(cls: type[LRScheduler], *_: Any, **__: Any) -> LRScheduler:
        scheduler = object.__new__(cls)
        _created.note(scheduler)
        return scheduler

    LRScheduler.__new__ = create  # type: ignore[assignment,method-assign]


def created_count() -> int:
    return _created.count


def schedulers_of(optimizers: list[Any]) -> list[LRScheduler]:
    """Return the schedulers over `optimizers`, in the order of their creation."""
    own = {id(each) for each in optimizers}

    def inner(scheduler: LRScheduler) -> Any:
        found = getattr(scheduler, "optimizer", None)
        return getattr(found, "optimizer", found)

    return [each for each in _created.alive() if id(inner(each)) in own]


# The training of one `Fabric`: its objects as parts of a session.

# Loaders that Fabric set up, so that each batch is counted and their place can be restored.


class FabricLoader(WrappedLoader):
    """Wraps a loader of Fabric, which sets the epoch of its sampler when a pass begins.

    Ranks may draw different orders, so a checkpoint keeps the order of each rank.
    """

    def install(self) -> order.Batches:
        return wrap_sampler(self.inner._dataloader, order.Batches)

    def is_at_end(self, done: int) -> bool:
        return done >= len(self.inner)

    def exhaust(self, batches: Iterator[Any]) -> None:
        """Ask for one more batch, as the program does. There is none."""
        next(batches, None)

    def describe(self, *, done: int, is_ending: bool, is_under_way: bool) -> dict[str, Any]:
        """Return what a checkpoint keeps, the same on all ranks.

        Fabric counts a pass when it begins. One that is under way begins again.
        """
        begun = {
            "iteration": int(self.inner._num_iter_calls) - is_under_way,
            "has_begun": self.has_begun,
        }
        if self.batches is None:
            return begun
        samples = len(self.inner.dataset)
        return {**begun, "samples": samples, "passes": self.passes, "done": done}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.inner._num_iter_calls = int(saved["iteration"])
        self.has_begun = bool(saved["has_begun"])
        if self.batches is None or "samples" not in saved:
            return
        self.require_samples(saved["samples"])
        self.passes = int(saved["passes"])
        if self.passes or saved["done"]:
            self.resumed = ResumedEpoch(passes=self.passes, done=int(saved["done"]))

    def before_pass(self) -> None:
        """Fabric keeps no iterator between passes."""

    def describe_rank(self, *, is_training: bool) -> dict[str, Any]:
        """Return the order of the newest pass, and the state of the sampler's own generator."""
        if self.batches is None:
            return {}
        generator = order.own_generator(self.batches.sampler_of_ids)
        now = {} if generator is None else {"generator": generator.get_state()}
        own = self.batches.order.own
        return {
            **super().describe_rank(is_training=is_training),
            "order": dict(self.batches.order.process),
            **({} if own is None else {"own": own}),
            **now,
        }

    def restore_rank(self, saved: Mapping[str, Any]) -> None:
        super().restore_rank(saved)
        if self.batches is None or "order" not in saved:
            return
        if "generator" in saved:
            order.set_generator(self.batches.sampler_of_ids, saved["generator"].clone())
        self.batches.order = order.LoaderOrder(saved["order"], saved.get("own"))
        if self.resumed is not None:
            self.resumed.order = self.batches.order


class FabricStream(StreamedLoader):
    """Wraps a loader over a stream that Fabric set up. A run keeps its global batch."""

    def __init__(self, *parts: Any, dealt: int, **more: Any) -> None:
        super().__init__(*parts, dealt=dealt, **more)
        self.global_batch = self.given[1]["batch_size"] * dealt

    def moved(self, batch: Any) -> Any:
        device = self.inner.device
        return batch if device is None else move_data_to_device(batch, device)

    @property
    def passes_of_inner(self) -> int:
        return int(self.inner._num_iter_calls)

    @passes_of_inner.setter
    def passes_of_inner(self, passes: int) -> None:
        self.inner._num_iter_calls = passes

    def describe(self, **place: Any) -> dict[str, Any]:
        found = super().describe(**place)
        return {**found, "batch": self.given[1]["batch_size"], "global_batch": self.global_batch}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        # A program that gives the loader another size than before has the last word.
        if saved.get("batch") == self.given[1]["batch_size"]:
            self.global_batch = int(saved["global_batch"])

    def open(self, session: FrameworkSession) -> None:
        source, options = self.given
        options = {key: value for key, value in options.items() if key != "batch_size"}
        self.stream = session.stream_of_loader(
            source, name=self.name, global_batch=self.global_batch, **options
        )


class FabricProgress(LoopProgress, RankLimited):
    """The place in the loaders. Those that are trained on keep their global batch and order."""

    def __init__(self, fabric: Any) -> None:
        super().__init__(fabric.device, prepare="fabric.setup_dataloaders")
        self._fabric = fabric
        # By the numbers of the loaders: the batch size as the program gave it, and how each loader
        # that was trained on gives the ranks their samples. Some loaders are made in each epoch.
        self._given: dict[int, int | None] = {}
        self._shares: dict[int, global_batch.SampleShare] = {}

    def add(self, loader: WrappedLoader) -> None:
        """Add a loader that Fabric set up. Raises `CheckpointError` if it cannot be continued."""
        self._given[loader.number] = global_batch.batch_size(loader.inner._dataloader)
        self._continue(loader)
        super().add(loader)

    def state_dict(self) -> dict[str, Any]:
        self._note_shares()
        shares = {str(number): asdict(each) for number, each in self._shares.items()}
        return {"shares": shares, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the place. Raises `CheckpointError` if other ranks cannot continue there."""
        self._shares = {
            int(number): global_batch.SampleShare(**each)
            for number, each in state["shares"].items()
        }
        for loader in self.loaders:
            self._continue(loader)
        super().load_state_dict(state)

    def rank_limits(self) -> dict[str, Any]:
        self._note_shares()
        streams = {
            each.global_batch
            for each in self.loaders
            if type(each) is FabricStream and each.has_trained
        }
        return global_batch.limits_of(list(self._shares.values()), streams)

    def _continue(self, loader: WrappedLoader) -> None:
        saved, fabric = self._shares.get(loader.number), self._fabric
        if saved is None or loader.batches is None:
            return
        inner = loader.inner._dataloader
        global_batch.continue_share(inner, saved, rank=fabric.global_rank, ranks=fabric.world_size)
        loader.batches.find_sampler()
        # Fabric's loader has the attributes of the one that it wraps.
        vars(loader.inner).update(vars(inner))

    def _note_shares(self) -> None:
        for loader in self.loaders:
            if loader.has_trained and loader.batches is not None:
                inner, ranks = loader.inner._dataloader, self._fabric.world_size
                self._shares[loader.number] = global_batch.SampleShare.of(
                    inner, ranks, self._given[loader.number]
                )


class FabricTraining(training.LoopTraining):
    """Connects the objects that Fabric set up to a `Session`."""

    words = training.Words(framework="a Fabric", owner="fabric", prepare="fabric.setup")
    shared_name = "fabric"
    rank_name = "fabric_rank"

    def __init__(self, fabric: Any, options: Mapping[str, Any]) -> None:
        super().__init__(FabricProgress(fabric), options)
        self._fabric = fabric
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._objects: dict[str, Any] = {}
        # How many schedulers existed when those over these optimizers were looked up, and these.
        self._created, self._found = 0, 0

    # --- what the program sets up ---------------------------------------------------------

    def add_model(self, module: Any) -> None:
        self._models.append(_unwrap_objects(module))

    def add_optimizer(self, optimizer: Any) -> None:
        """Add an optimizer that Fabric wrapped, whose steps are seen from now on."""
        inner = _unwrap_objects(optimizer)
        self._optimizers.append(inner)
        inner.register_step_post_hook(lambda stepped, *_: self.note_step(stepped))

    def add_scheduler(self, scheduler: Any) -> None:
        """Add a scheduler that the program named. Those of torch are found without it."""
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            self._schedulers.append(scheduler)

    def register(self, objects: Mapping[str, Any]) -> None:
        """Add further objects by name. Raises `SpecError` for a name that is taken."""
        for name, each in objects.items():
            self.require_unopened(each)
            if name in {*self._objects, PRECISION, self.shared_name}:
                raise SpecError(f"fabric.register({name}=...): this name is taken; use another")
            self._objects[name] = each

    # --- the session ----------------------------------------------------------------------

    def models(self) -> list[nn.Module]:
        return self._models

    def parts(self) -> training.Parts:
        if not self._models or not self._optimizers:
            raise SpecError(
                f"{len(self._models)} models and {len(self._optimizers)} optimizers are set up; "
                "expected fabric.setup(model, optimizer) before the loop over fabric.epochs"
            )
        found = schedulers_of(self._optimizers)
        self._created, self._found = created_count(), len(found)
        return training.Parts(
            optimizers=self._optimizers,
            schedulers=[*found, *self._schedulers],
            extra={**precision_of(self._fabric), **self._objects},
        )

    def end(self) -> None:
        """Wait for the last commit, close the session, and write what loggers have buffered."""
        self.close()
        for logger in self._fabric.loggers:
            logger.finalize("success")

    def after_boundary(self, session: FrameworkSession) -> None:
        """Close the session after the last epoch. Raises `SpecError` for a late scheduler."""
        if created_count() != self._created:
            self._created = created_count()
            if len(schedulers_of(self._optimizers)) > self._found:
                raise SpecError(
                    "a learning rate scheduler was created after the run has resumed, so no "
                    "checkpoint contains it; create it before the loop over fabric.epochs"
                )
        if not self._is_looping and self._has_looped and not session.should_stop:
            self.close()


watch_schedulers()


class Fabric(training.LoopMethods[FabricTraining], LightningFabric):
    """A `Fabric` that resumes automatically and stops on all ranks after the same step.

    Loop over `fabric.epochs(n)` in place of `range(n)`. A step is complete when the program asks
    the loader for the batch after the optimizer's step. Then Holdfast saves if a save is due. When
    the ranks have agreed to stop, the process ends there with status 0.
    """

    def __init__(self, *, session: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Takes the arguments of Lightning's, and in `session` further ones of `Session`.

        `session={"interval": "10m"}` is an example. Under torchrun, `devices` and `num_nodes` are
        those of torchrun, and Fabric is launched. Raises `SpecError` for a strategy that is not
        supported, and if Fabric itself would start the processes.
        """
        is_under_torchrun = is_torchelastic_launched()
        if (
            is_under_torchrun
            and not _is_using_cli()
            and not isinstance(kwargs.get("devices"), list)
        ):
            kwargs |= torchrun_size()
        super().__init__(**kwargs)
        check_strategy(self.strategy)
        self._require_started(is_under_torchrun)
        self._training = FabricTraining(self, session or {})
        if is_under_torchrun and not self._launched:
            super().launch()

    # --- the loop -------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to the checkpoints, by name.

        Models, optimizers and torch's schedulers are there without it. The states must be the same
        on all ranks. Raises `SpecError` for a name that is taken, and after the run has resumed.
        """
        self._training.register(objects)

    def close(self) -> None:
        """Saves the state that is not saved yet, waits for the commit, and closes the session.

        The end of `epochs` does so. Call it only if the program leaves that loop early, for example
        by `break`. Such a run is complete. Raises `SaveError` if the commit failed.
        """
        self._training.close()

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs to the loggers as Lightning does, and numbers to the run's metrics too."""
        super().log_dict(metrics, step=step)
        self._record_numbers(metrics)

    # --- preparation ----------------------------------------------------------------------

    def setup(self, module: Any, *optimizers: Any, scheduler: Any = None, **kwargs: Any) -> Any:
        """Sets up as Lightning does. Raises `SpecError` after the run has resumed."""
        self._training.require_unopened(module)
        given = super().setup(module, *optimizers, scheduler=scheduler, **kwargs)
        parts = given if isinstance(given, tuple) else (given,)
        self._training.add_model(parts[0])
        for each in parts[1 : 1 + len(optimizers)]:
            self._training.add_optimizer(each)
        self._training.add_scheduler(scheduler)
        return given

    def setup_module(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Sets up as Lightning does. Raises `SpecError` after the run has resumed."""
        self._training.require_unopened(module)
        given = super().setup_module(module, *args, **kwargs)
        self._training.add_model(given)
        return given

    def setup_optimizers(self, *optimizers: Any) -> Any:
        """Sets up as Lightning does. Raises `SpecError` after the run has resumed."""
        for each in optimizers:
            self._training.require_unopened(each)
        given = super().setup_optimizers(*optimizers)
        for each in given if isinstance(given, tuple) else (given,):
            self._training.add_optimizer(each)
        return given

    def _setup_dataloader(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Sets up a loader as Lightning does, so that its place can be restored."""
        inner = super()._setup_dataloader(dataloader, *args, **kwargs)
        loader = self._wrapped(dataloader, inner)
        self._training.progress.add(loader)
        return loader

    def _wrapped(self, given: Any, inner: Any) -> WrappedLoader:
        """Return the wrapper of a loader that the program gave and Fabric set up."""
        number, iterate = len(self._training.progress.loaders), self._training.iterate
        if not (is_stream(given) and has_shards(given.dataset)):
            return FabricLoader(inner, number, iterate)
        try:
            found = stream_arguments(given)
        except SpecError as error:
            loader = FabricLoader(inner, number, iterate)
            loader.problem = f"a loader whose samples no resume could find again: {error}"
            return loader
        return FabricStream(inner, number, iterate, found, dealt=self.world_size)

    # --- the processes --------------------------------------------------------------------

    def _require_started(self, is_under_torchrun: bool) -> None:
        """Raise `SpecError` if Fabric itself would start processes, or would not use them all."""
        environment = getattr(self.strategy, "cluster_environment", None)
        is_external = environment is None or environment.creates_processes_externally
        starts = getattr(self.strategy, "_start_method", "popen") != "popen"
        if self.world_size > 1 and (starts or not is_external):
            raise SpecError(
                f"Fabric would start {self.world_size} processes itself; start the program with "
                "`holdfast submit`, or with torchrun, so that each rank has its place in the run"
            )
        if is_under_torchrun and self.world_size != _ranks_of_torchrun():
            raise SpecError(
                f"Fabric has {self.world_size} ranks and torchrun started {_ranks_of_torchrun()}, "
                "so each would train alone; leave out devices, num_nodes and strategy"
            )


def _ranks_of_torchrun() -> int:
    size = torchrun_size()
    return size["devices"] * size["num_nodes"]
