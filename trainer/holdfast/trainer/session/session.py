"""`Session` makes a plain torchrun training loop fault tolerant.

    session = Session(model, optimizer, scheduler, extra={"ema": ema}, seed=0)
    for step in session.steps(total):
        ids = session.batch(len(dataset), global_batch=64)
        …one optimizer step…
        session.log(loss=loss.item())
    session.close()

The constructor resumes from the newest checkpoint that verifies. `steps` counts from 1 and
continues after the restored step. It saves between steps when a save is due. It ends early when all
ranks have agreed to stop, after the last checkpoint is committed. A session works the same under an
agent, under plain torchrun and in a single process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from holdfast.contracts.deprecated import warn_deprecated
from holdfast.trainer.arguments import (
    check_best,
    check_kinds,
    check_model,
    check_named,
    check_seed,
    check_stateful,
    truth,
    whole,
)
from holdfast.trainer.data.order import Batch
from holdfast.trainer.data.sampler import ElasticDistributedSampler, ElasticSampler, check_order
from holdfast.trainer.loading.restore import load_tensors
from holdfast.trainer.metrics import improved, numbers_in
from holdfast.trainer.saving.saver import Saver
from holdfast.trainer.session import alone
from holdfast.trainer.session.parts import SessionParts, while_open
from holdfast.trainer.session.settings import Settings
from holdfast.trainer.state.fit import ResumeFit
from holdfast.trainer.state.local_buffers import warn_of_local_buffers
from holdfast.trainer.state.made_with import describe_made
from holdfast.trainer.state.objects import Stateful
from holdfast.trainer.state.optimizer_steps import OptimizerSteps
from holdfast.trainer.state.optimizers import unwrap
from holdfast.trainer.state.train_state import TrainState, listed
from holdfast.trainer.trackers.sink import open_sink
from holdfast.trainer.trackers.tracker import Tracker

T = TypeVar("T")


def _saver_of(state: TrainState, planner: SavePlanner | None) -> partial[Saver]:
    """Return what makes the saver of a program's `state`, which has not been loaded yet."""
    state.remember()
    return partial(
        Saver,
        note_forms=state.note_forms,
        check=state.check,
        notice=state.notice,
        steady=state.steady,
        planner=planner,
    )


class Session(SessionParts):
    """Makes a training program fault tolerant. Every rank makes one and uses it in the same way.

    It is also a context manager. If the block ends normally, it calls `close`. If the block ends
    by an exception, it saves nothing, records the traceback for torchrun, and lets the exception
    propagate.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        seed: int = 0,
        interval: int | str | None = None,
        directory: str | Path | None = None,
        best: tuple[str, str] | None = None,
        mesh: DeviceMesh | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        exclude: str | Sequence[str] = (),
        snapshots: int | str | None = None,
        planner: SavePlanner | None = None,
        overlap: bool | None = None,
    ) -> None:
        """Resumes from the newest checkpoint that verifies.

        Call it after `init_process_group`, and after you have sharded, wrapped and moved the model.

        Args:
            model: one module, or a list of the parts of one model.
            optimizer: one, a list, or none.
            scheduler: any object with `state_dict` and `load_state_dict`; one, a list, or none.
            extra: objects with a state that is the same on all ranks, by name, such as an EMA.
            per_rank: objects whose state differs between ranks, by name: a loader, a
                `torch.Generator`. They are restored only at the same world size.
            seed: determines the data order. It also seeds the ranks without a saved random state.
            interval: steps (`50`) or seconds (`"10m"`) between checkpoints. Default: `"auto"`. A
                key `checkpoint.interval` in the spec has precedence.
            directory: the run's folder when there is no agent. The default is
                `$HOLDFAST_ROOT/<script>`, or `./runs/<script>` without that variable.
            best: a logged metric and `"min"` or `"max"`, such as `("accuracy", "max")`.
            mesh: a `DeviceMesh` of all ranks. Stages of `pp` save into folders of their own. Ranks
                along `pp`, `tp`, `cp` and `sp` get the same samples.
            strict: refuse a checkpoint whose keys differ from those of the program.
            rename: saved names to new ones, for checkpoints that were saved without this rule.
            exclude: parts that begin afresh from a checkpoint that was saved without this, and
                from any checkpoint that they do not fit.
            snapshots: steps between snapshots, `"auto"` or `"off"`, with the rule of `interval`.
            planner: your own `SavePlanner`. There are no snapshots with it.
            overlap: let copies continue until an optimizer steps, see `before_update`.

        Raises `PreflightError` if the process group or the flusher is missing, `CheckpointError`
        if the checkpoint does not fit the program, `DamagedCheckpointError` if no undamaged one is
        left, `SessionError` if this process has an open Session, and `SpecError` for an argument.
        """
        check_best(best)
        check_model(model)
        check_stateful(optimizer, "optimizer")
        check_stateful(scheduler, "scheduler")
        check_named(extra, "extra")
        check_named(per_rank, "per_rank")
        check_kinds(mesh=mesh, planner=planner, directory=directory)
        fit = ResumeFit.of(strict=strict, rename=rename, exclude=exclude)
        settings = Settings.of(interval, snapshots, overlap)
        self.seed, self._best_of = check_seed(seed), (best[0], best[1]) if best else None
        optimizers, schedulers = listed(optimizer), listed(scheduler)
        with alone.claimed(self, self._abandon):
            self._optimizers = OptimizerSteps(map(unwrap, optimizers))
            self._made_with = describe_made(map(unwrap, optimizers), schedulers)
            self._join(directory, mesh)
            state = self._state_of(model, optimizers, schedulers, extra, per_rank, fit)
            warn_of_local_buffers(extra or {}, self.rank, self.world_size)
            load = partial(load_tensors, self._ranks, state)
            self._start(self._restore(state, _saver_of(state, planner), load), settings)

    def _state_of(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Stateful],
        extra: Mapping[str, Any] | None,
        per_rank: Mapping[str, Any] | None,
        fit: ResumeFit,
    ) -> TrainState:
        return TrainState(
            model,
            optimizers,
            schedulers,
            extra,
            per_rank=per_rank,
            fit=fit,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )

    # --- where training stands ------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of complete optimizer steps."""
        return self._position.completed

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the loop over `epochs`.

        Without such a loop, the epoch of the next step's data.
        """
        return self._position.epoch

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._ranks.world_size

    @property
    def run_directory(self) -> Path:
        """The run's folder. You may keep your own files there."""
        return self._context.run.directory

    @property
    def should_stop(self) -> bool:
        """True when all ranks have agreed to stop and the last checkpoint is committed."""
        return self._loop.should_stop

    @property
    def stop_requested(self) -> bool:
        """True as soon as a stop is requested. Ranks see it at different times."""
        return self.should_stop if self._is_closed else self._context.status_table.stopping

    # --- the loop -------------------------------------------------------------------------

    @while_open
    def steps(self, total: int) -> Iterator[int]:
        """Iterates over the remaining steps, counted from 1, up to `total`.

        A step is complete when the loop asks for the next. The loop ends early when all ranks
        have agreed to stop. By then the last checkpoint is committed. Raises `SaveError` if it
        could not be.
        """
        loop, total = self._loop, whole(total, "total")
        loop.leave_step()
        if not loop.is_in_epochs:
            loop.promise(steps=total)
        if loop.completed < total and self._enter_loop(is_last=True):
            return
        while loop.completed < total:
            loop.is_inside_step, loop.was_left = True, False
            try:
                yield loop.completed + 1
            except GeneratorExit:
                loop.was_left = True
                raise
            loop.is_inside_step = False
            if loop.boundary():
                return
        if not loop.is_in_epochs:
            loop.finish()

    @while_open
    def epochs(self, total: int) -> Iterator[int]:
        """Iterates over the remaining epochs, counted from 0, up to `total` - 1.

        Code after the last step of an epoch (evaluation, a scheduler's step, `checkpoint`) is the
        end of the epoch. It is complete when the loop asks for the next epoch. A resume from an
        earlier checkpoint runs it again. The loop ends early when all ranks have agreed to stop.
        Then `should_stop` is true, and the program must leave out the end of the epoch. Raises
        `SaveError` if the last checkpoint could not be committed.
        """
        loop, position, total = self._loop, self._position, whole(total, "total")
        loop.leave_step()
        loop.promise(epochs=total)
        position.begin_epochs(self._began_in[0], in_epoch=self._began_in[1])
        # In an epoch that had already begun, the loader's iterator had already been created.
        if self._enter_loop(is_last=not position.in_epoch):
            return
        loop.is_in_epochs = True
        try:
            while (epoch := position.epoch) < total:
                yield epoch
                loop.leave_step(ends_epoch=True)
                if loop.finish_epoch():
                    return
        finally:
            loop.is_in_epochs = False
        loop.finish()

    @while_open
    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterates over `loader`. Each batch is one step.

        If the loader has a sampler of this session and `batch_size` samples are only a part of a
        step's, as many batches as fill it are one step. A step is complete when the loop asks for
        the next batch. The loop ends early when all ranks have agreed to stop. To number the
        batches, use `enumerate` of the session, because Python's begins at 0 after a resume.
        Raises `SpecError` for a DataLoader that shuffles and has no state, and `SaveError` if the
        last checkpoint could not be committed.
        """
        return (batch for _, batch in self.enumerate(loader))

    @while_open
    def enumerate(self, loader: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Iterates over `loader` as `batches` does, with the number of each batch in its epoch.

        The numbers count from 0. After a resume inside an epoch they continue, and do not begin
        again, so `if (number + 1) % 4 == 0` is true for the same batches. Raises as `batches`.
        """
        return self._number(loader, self._batches_per_step(loader))

    def _number(self, loader: Iterable[T], parts: int) -> Iterator[tuple[int, T]]:
        loop = self._loop
        loop.leave_step()
        batches = iter(loader)
        if self._enter_loop(is_last=True):
            return
        for number, batch in enumerate(batches, self._position.batches_before(parts, batches)):
            loop.is_inside_step, loop.was_left = True, False
            try:
                yield number, batch
            except GeneratorExit:
                loop.was_left = True
                raise
            if not self._ends_step(number, parts):
                continue
            loop.is_inside_step = False
            if loop.boundary():
                return
        loop.is_at_end = loop.is_in_epochs

    def _batches_per_step(self, loader: Iterable[Any]) -> int:
        """Return how many batches of `loader` are one step. Raises as `batches`."""
        if not (isinstance(loader, Iterable) or hasattr(loader, "__getitem__")):
            raise TypeError(f"loader={loader!r}: expected an iterable of batches")
        return check_order(loader)

    def _ends_step(self, number: int, parts: int) -> bool:
        """Return False if the program only accumulated gradients of the batch `number`."""
        return (number + 1) % parts == 0

    @property
    def first_batch(self) -> int:
        """The number, from 0, of the next batch of the epoch.

        At the start of a loop over a loader, it is 0 except in the epoch in which the run resumed.
        In a loop that you write yourself, pass it to Python's `enumerate` as the start.
        """
        return self._position.batches_before(self._position.batches_per_step)

    @while_open
    def boundary(self) -> bool:
        """Ends one step in a loop that you write yourself; saves if a checkpoint is due.

        Returns True when this rank must leave now. By then the last checkpoint is committed.
        """
        return self._loop.boundary()

    @while_open
    def checkpoint(self) -> None:
        """Requests a checkpoint at the end of this step or epoch. Call it on every rank."""
        self._loop.require_training()
        self._loop.is_checkpoint_wanted = True

    @while_open
    def before_update(self) -> None:
        """Waits until the state may change. Call it before an update that no optimizer makes.

        With `overlap`, the copy of a save continues until an optimizer steps. Call this before your
        program changes parameters or the state of an optimizer in another way, such as by hand or
        by a compiled optimizer. It does nothing if no copy is under way.
        """
        self._saver.complete_copy()

    @while_open
    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Session]:
        """A context manager for a slow phase: `"eval"`, `"compile"`, `"load"` or `"save"`.

        The hang detector compares the phase with its own earlier durations. Raises `SpecError`
        for another name.
        """
        with self._loop.phase(name):
            yield self

    @while_open
    def beat(self) -> None:
        """Reports, inside a slow phase, that this rank is alive."""
        self._record.beat(self._record.phase)

    # --- data -----------------------------------------------------------------------------

    @while_open
    def batch(self, dataset_size: int, global_batch: int, *, ahead: int = 0) -> Batch:
        """Returns this rank's sample ids of the current step, or of the step `ahead` steps later.

        The shape is (global_batch / parts,), int64. There are as many parts as ranks, or fewer if
        ranks of the mesh work on the same samples. The ids depend only on seed, step, global batch
        and recorded skip windows. So together the ranks see the same samples at every number of
        ranks. Raises `SpecError` if the ranks cannot share the global batch evenly, or if the
        dataset is smaller than the global batch.
        """
        size, batch = whole(dataset_size, "dataset_size"), whole(global_batch, "global_batch")
        return self._position.batch(size, batch, whole(ahead, "ahead"))

    @while_open
    def sampler(self, dataset_size: int, global_batch: int, total: int) -> ElasticSampler:
        """Returns a `batch_sampler` for a DataLoader: one batch per step, up to step `total`.

        An iteration begins with the current step. torchdata's `StatefulDataLoader` works too.
        """
        size, batch = whole(dataset_size, "dataset_size"), whole(global_batch, "global_batch")
        return self._position.sampler(size, batch, whole(total, "total"))

    @while_open
    def distributed_sampler(
        self, dataset_size: int, global_batch: int, *, batch_size: int | None = None
    ) -> ElasticDistributedSampler:
        """Returns a `sampler` that replaces torch's `DistributedSampler`.

        It yields this rank's ids of the rest of the epoch. `batch_size` is that of the loader:
        global_batch / ranks, or less for gradient accumulation. Raises `SpecError` if it does not
        divide that number.
        """
        size, batch = whole(dataset_size, "dataset_size"), whole(global_batch, "global_batch")
        part = None if batch_size is None else whole(batch_size, "batch_size", least=1)
        return self._position.distributed_sampler(size, batch, part)

    @staticmethod
    def worker_init(_worker: int) -> None:
        """Does nothing. Older programs pass it to a data loader as `worker_init_fn`.

        Deprecated: the workers of loaders survive the signals that end a job without it.
        """
        warn_deprecated(
            "Session.worker_init", "it does nothing, so leave worker_init_fn out", removed_in="0.3"
        )

    # --- metrics --------------------------------------------------------------------------

    @while_open
    def log(self, /, **values: float) -> None:
        """Records metrics of the current step. Rank 0 writes its own to the run's folder.

        Raises `SpecError` for a metric named `step` or `time`, which each line of metrics has
        already, and `TypeError` for a value that is not one number.
        """
        numbers, step = numbers_in(values), self._loop.step_under_way
        self.best = improved(self.best, self._best_of, numbers, step)
        if self._guard.metric in numbers and self._observed != step:
            self._guard.observe(step, numbers[self._guard.metric])
        self._recorder.log(step, numbers)
        for sink in self._sinks:
            sink.log(step, numbers)

    @while_open
    def observe(self, loss: float | Tensor) -> None:
        """Watches a loss of the current step without writing it and without waiting for the GPU.

        `log` does so for the metric `loss`, unless the step's loss was given here before. The
        spec's `supervision.numerics` sets what happens after a loss that is not finite or far above
        those before it.
        """
        self._observed = self._position.completed + 1
        if self._recorder.watch.wanted:
            self._recorder.watch.meet((self._guard.metric,))
        self._guard.observe(self._observed, loss)

    @while_open
    def track(self, tracker: Tracker) -> None:
        """Sends what `log` records to an experiment tracker, too. Call it on every rank.

        The tracker has one run over all relaunches. Only rank 0 opens it. A tracker that cannot
        be opened, or does not answer, is reported and does not stop training.
        """
        if not isinstance(tracker, Tracker):
            raise TypeError(f"tracker={tracker!r}: expected a Tracker of holdfast.trainer.trackers")
        if self._ranks.rank == 0:
            sink = open_sink(tracker, self._context, self._recorder, step=self.step)
            self._sinks += [sink] if sink is not None else []

    # --- the end --------------------------------------------------------------------------

    def close(self, *, may_end_early: bool = True) -> None:
        """Saves the state that is not saved yet, waits for the commit, releases all resources.

        After a loop that was left by `break`, the last step counts if an optimizer has stepped in
        it. After an exception, nothing is saved: neither while it passes, as in a `finally` block,
        nor later if it came from a step boundary, such as `NumericsError`. Further calls do
        nothing. Raises `SaveError` if the last checkpoint could not be committed.

        A program that calls this before its last step declares that it is complete, as after early
        stopping. Pass `may_end_early=False` where code of a framework calls it, whatever the reason
        why training ended: an end before the promised number of steps is then incomplete.
        """
        truth(may_end_early, "may_end_early")
        if self._is_closed or self._is_in_child:
            return
        if self.has_failed:
            self._leave(None, wait=True)
            return
        is_orderly = False
        try:
            loop, is_handling = self._loop, self._is_handling
            if not loop.is_finished and loop.can_finish(is_handling=is_handling):
                loop.finish(is_declared=may_end_early)
            else:
                self._saver.wait()
                self._loop.note_end(is_declared=may_end_early)
            is_orderly = True
        finally:
            self._release(wait=True, is_orderly=is_orderly)

    @while_open
    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error, wait=False)
