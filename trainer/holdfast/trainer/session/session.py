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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from holdfast.contracts.deprecated import warn_deprecated
from holdfast.contracts.node.rank_status import NOWHERE, Phase
from holdfast.trainer import arguments
from holdfast.trainer.data.order import Batch
from holdfast.trainer.data.position import Position
from holdfast.trainer.data.sampler import ElasticDistributedSampler, ElasticSampler, check_order
from holdfast.trainer.loading.restore import Load, Resumed, load_tensors, resume
from holdfast.trainer.metrics import open_recorder
from holdfast.trainer.numerics.guard import LossGuard
from holdfast.trainer.pacing.pace import Pace
from holdfast.trainer.process import child_signals
from holdfast.trainer.process.signals import SignalFlags
from holdfast.trainer.ranks.rank_context import RankContext, open_control_group, open_rank_context
from holdfast.trainer.saving.saver import Captured, Saver, UpdateHook
from holdfast.trainer.session.lifetime import Lifetime, claimed, release, while_open
from holdfast.trainer.session.loop import Loop
from holdfast.trainer.session.rank_metrics import RankMetrics
from holdfast.trainer.session.settings import Settings
from holdfast.trainer.session.stop_coordinator import StopCoordinator
from holdfast.trainer.session.streaming import StreamMethods
from holdfast.trainer.slots.modes import Staging
from holdfast.trainer.state import not_restored, run_state
from holdfast.trainer.state.fresh import ResumeFit
from holdfast.trainer.state.objects import Stateful
from holdfast.trainer.state.optimizer_steps import OptimizerSteps
from holdfast.trainer.state.optimizers import unwrap
from holdfast.trainer.state.train_state import TrainState, listed
from holdfast.trainer.trackers.tracker import Tracker

T = TypeVar("T")


def _saver_of(state: TrainState, planner: SavePlanner | None, staging: Staging) -> partial[Saver]:
    """Return what makes the saver of a program's `state`, which has not been loaded yet."""
    state.remember()
    return partial(
        Saver,
        note_forms=state.note_forms,
        check=state.check,
        notice=state.notice,
        steady=state.steady,
        planner=planner,
        staging=staging,
    )


class Session(StreamMethods):
    """Makes a training program fault tolerant. Every rank makes one and uses it in the same way.

    It is also a context manager. If the block ends normally, it calls `close`. If the block ends
    by an exception, it saves nothing, records the traceback for torchrun, and lets the exception
    propagate.
    """

    _stop_coordinator: StopCoordinator | None = None
    _updates: UpdateHook | None = None
    # Where a run begins that has no checkpoint, see `FrameworkSession`.
    _start_from: Path | None = None
    _begins_at = 0

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
        staging: str | None = None,
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
            staging: `"memory"`, `"single"` or `"disk"`, see `checkpoint.staging`.

        Raises `PreflightError` if the process group or the flusher is missing, `CheckpointError`
        if the checkpoint does not fit the program, `DamagedCheckpointError` if no undamaged one is
        left, `SessionError` if this process has an open Session, and `SpecError` for an argument.
        """
        arguments.check_best(best)
        arguments.check_program(model, optimizer, scheduler, extra, per_rank)
        arguments.check_kinds(mesh=mesh, planner=planner, directory=directory)
        fit = ResumeFit.of(strict=strict, rename=rename, exclude=exclude)
        settings = Settings.of(interval, snapshots, overlap, staging)
        self.seed, self._best_of = arguments.check_seed(seed), (best[0], best[1]) if best else None
        optimizers, schedulers = listed(optimizer), listed(scheduler)
        with claimed(self, self._abandon):
            self._optimizers = OptimizerSteps(map(unwrap, optimizers))
            self._made_with = not_restored.describe_made(map(unwrap, optimizers), schedulers)
            self._join(directory, mesh)
            who: dict[str, Any] = {"fit": fit, "rank": self.rank, "world_size": self.world_size}
            state = TrainState(model, optimizers, schedulers, extra, per_rank=per_rank, **who)
            not_restored.check_objects(state.streams, extra or {}, self._ranks)
            saver = _saver_of(state, planner, settings.staging)
            load = partial(load_tensors, self._ranks, state)
            self._start(self._restore(state, saver, load), settings)

    # --- the start ------------------------------------------------------------------------

    def _join(self, directory: str | Path | None, mesh: DeviceMesh | None) -> None:
        """Join the other ranks, and register in the node's status table."""
        # After torch's own hook at exit: a loader may start its workers while it is restored, and
        # fail.
        child_signals.hold(())
        self._life = Lifetime()
        self._ranks = open_control_group()
        self._context: RankContext = open_rank_context(directory, self._ranks, mesh)
        identity = self._context.identity
        self._record = self._context.status_table.record(identity.local_rank)
        self._record.register(identity.rank, NOWHERE)
        # Under an agent, the agent handles signals.
        self._flags = None if self._context.has_agent else SignalFlags(self._record)
        if self._flags is None:
            child_signals.survive_in_session()
        self._record.beat(Phase.LOAD)

    def _restore(
        self, state: run_state.ProgramState, open_saver: Callable[..., Saver], load: Load
    ) -> Resumed:
        """Restore the newest checkpoint that verifies. Return the resumed position."""
        self._state = state
        self._recorder = open_recorder(self._context)
        self._metrics = RankMetrics(self._context, self._recorder, self._best_of)
        self._saver = open_saver(
            self._context, self._ranks, self._record, self._recorder, capture=self._capture
        )
        found = resume(
            self._context,
            self._ranks,
            load,
            self._recorder,
            start_from=self._start_from,
            begins_at=self._begins_at,
        )
        self._saver.began_at(found.step, found.checkpoint, found.manifest)
        self.resumed_from = found.checkpoint
        restarted = self._metrics.resume(found.best)
        changed = not_restored.describe_changes(
            found.program.get(run_state.MADE_WITH, {}), self._made_with
        )
        for text in filter(None, (restarted, changed)):
            self._recorder.note(text)
        self._began_in = found.epoch, found.in_epoch
        self._position = Position(
            rank=self._context.data_part,
            world_size=self._context.data_parts,
            seed=self.seed,
            seeds=self._ranks.gather(lambda: self.seed),
            skips=found.skips,
            former=found.data,
            completed=found.step,
            epoch=found.epoch if found.in_epoch else None,
            steps_in_epoch=int(found.program.get(run_state.STEPS_IN_EPOCH, 0)),
            begins=self._state.rewind_seeds,
        )
        return found

    def _start(self, found: Resumed, settings: Settings) -> None:
        """Prepare the loop, its saves and its stops after the resumed position."""
        settings.announce(self._recorder.event, self._ranks.rank)
        self._guard = LossGuard(
            self._context, self._ranks, self._record, self._position, self._saver, self._state
        )
        self._guard.resume(map(float, found.program.get(run_state.LOSSES, ())))
        awaits_state = bool(self._ranks.largest([self._state.awaits_first_step])[0])
        pace = Pace(
            settings.interval,
            settings.rhythm,
            step=found.step,
            context=self._context,
            saver=self._saver,
            recorder=self._recorder,
            looks_first=awaits_state,
        )
        self._loop = Loop(
            self._context,
            self._ranks,
            self._record,
            self._recorder,
            saver=self._saver,
            guard=self._guard,
            pace=pace,
            position=self._position,
            optimizers=self._optimizers,
            flags=self._flags,
        )
        self._record.register(self._ranks.rank, found.step)
        self._saver.overlaps = settings.overlaps
        if settings.overlaps:
            self._updates = UpdateHook(self._saver)
        self._saver.begin(awaits_state=awaits_state)
        if not self._context.has_agent and self._context.identity.local_rank == 0:
            self._stop_coordinator = StopCoordinator(self._context, self._recorder.event)
        # Work that the program still does before its first step counts as loading.
        self._record.beat(Phase.LOAD)
        self._life.release_at_exit(self._release)

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
    def best(self) -> dict[str, Any]:
        """The best value so far of the metric of `best`, with its step. Empty without one."""
        return self._metrics.best

    @property
    def has_failed(self) -> bool:
        """True if an exception ended training, so that `close` saves nothing.

        It came from a step boundary, or the program handles it now, as in a `finally` block.
        """
        return bool(self._loop.failure) or self._life.passing() is not None

    @property
    def should_stop(self) -> bool:
        """True when all ranks have agreed to stop and the last checkpoint is committed."""
        return self._loop.should_stop

    @property
    def stop_requested(self) -> bool:
        """True as soon as a stop is requested. Ranks see it at different times."""
        return self.should_stop if self._life.is_closed else self._context.status_table.stopping

    # --- the loop -------------------------------------------------------------------------

    @while_open
    def steps(self, total: int) -> Iterator[int]:
        """Iterates over the remaining steps, counted from 1, up to `total`.

        A step is complete when the loop asks for the next. The loop ends early when all ranks
        have agreed to stop. By then the last checkpoint is committed. Raises `SaveError` if it
        could not be.
        """
        loop, total = self._loop, arguments.whole(total, "total")
        self._note_unknown_data()
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
        loop, position, total = self._loop, self._position, arguments.whole(total, "total")
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

        The numbers count from 0 and continue after a resume inside an epoch. Raises as `batches`.
        """
        return self._number(loader, self._batches_per_step(loader))

    def _number(self, loader: Iterable[T], parts: int) -> Iterator[tuple[int, T]]:
        loop = self._loop
        loop.leave_step()
        batches = iter(loader)
        if self._enter_loop(is_last=True):
            return
        for number, batch in self._numbered(loader, batches, parts):
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
        return check_order(loader, self._state.saves)

    def _ends_step(self, number: int, parts: int) -> bool:
        """Return False if the program only accumulated gradients of the batch `number`."""
        return (number + 1) % parts == 0

    def _enter_loop(self, *, is_last: bool) -> bool:
        """Restore the random generators and begin the loop. Return True to leave it at once."""
        self._life.enter_loop()
        self._loop.warn_of_draws(self._state.rewind_generators(is_last=is_last))
        return self._loop.enter()

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
        leaves = self._loop.boundary()
        # A look at all objects of the program does not prolong its first save.
        if self._has_passed_boundary or not self._saver.is_flushing:
            self._note_unknown_data(in_step=True)
        self._has_passed_boundary = True
        return leaves

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
        self._saver.complete_copy(is_update=True)

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

    stream = StreamMethods.stream

    @while_open
    def batch(self, dataset_size: int, global_batch: int, *, ahead: int = 0) -> Batch:
        """Returns this rank's sample ids of the current step, or of the step `ahead` steps later.

        The shape is (global_batch / parts,), int64. There are as many parts as ranks, or fewer if
        ranks of the mesh work on the same samples. The ids depend only on seed, step, global batch
        and recorded skip windows. So together the ranks see the same samples at every number of
        ranks. Raises `SpecError` if the ranks cannot share the global batch evenly, or if the
        dataset is smaller than the global batch.
        """
        size, batch = (
            arguments.whole(dataset_size, "dataset_size"),
            arguments.whole(global_batch, "global_batch"),
        )
        return self._position.batch(size, batch, arguments.whole(ahead, "ahead"))

    @while_open
    def sampler(self, dataset_size: int, global_batch: int, total: int) -> ElasticSampler:
        """Returns a `batch_sampler` for a DataLoader: one batch per step, up to step `total`.

        An iteration begins with the current step. torchdata's `StatefulDataLoader` works too.
        """
        size, batch = (
            arguments.whole(dataset_size, "dataset_size"),
            arguments.whole(global_batch, "global_batch"),
        )
        return self._position.sampler(size, batch, arguments.whole(total, "total"))

    @while_open
    def distributed_sampler(
        self, dataset_size: int, global_batch: int, *, batch_size: int | None = None
    ) -> ElasticDistributedSampler:
        """Returns a `sampler` that replaces torch's `DistributedSampler`.

        It yields this rank's ids of the rest of the epoch. `batch_size` is that of the loader:
        global_batch / ranks, or less for gradient accumulation. Raises `SpecError` if it does not
        divide that number.
        """
        size, batch = (
            arguments.whole(dataset_size, "dataset_size"),
            arguments.whole(global_batch, "global_batch"),
        )
        part = None if batch_size is None else arguments.whole(batch_size, "batch_size", least=1)
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
        self._metrics.log(self._loop.step_under_way, values, self._guard)

    @while_open
    def observe(self, loss: float | Tensor) -> None:
        """Watches a loss of the current step without writing it and without waiting for the GPU.

        `log` does so for the metric `loss`, unless the step's loss was given here before. The
        spec's `supervision.numerics` sets what happens after a loss that is not finite or far above
        those before it.
        """
        self._metrics.observe(self._position.completed + 1, loss, self._guard)

    @while_open
    def track(self, tracker: Tracker) -> None:
        """Sends what `log` records to an experiment tracker, too. Call it on every rank.

        The tracker has one run over all relaunches. Only rank 0 opens it. A tracker that cannot
        be opened, or does not answer, is reported and does not stop training.
        """
        self._metrics.track(tracker, self.step)

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
        arguments.truth(may_end_early, "may_end_early")
        if self._life.is_over:
            return
        if self.has_failed:
            self._leave(None, wait=True)
            return
        is_orderly = False
        try:
            loop, is_handling = self._loop, self._life.is_handling
            if not loop.is_finished and loop.can_finish(is_handling=is_handling):
                loop.finish(is_declared=may_end_early)
            else:
                self._saver.wait()
                self._loop.note_end(is_declared=may_end_early)
            is_orderly = True
        finally:
            self._release(wait=True, is_orderly=is_orderly)

    def _capture(self) -> Captured:
        progress = run_state.TrainingProgress(
            step=self._loop.completed,
            seed=self.seed,
            epoch=self._position.epoch,
            in_epoch=self._position.in_epoch,
            data=self._position.describe(),
            best=self._metrics.best,
            program={
                run_state.MADE_WITH: self._made_with,
                run_state.STEPS_IN_EPOCH: self._position.steps_in_epoch,
                run_state.LOSSES: self._guard.losses,
            },
        )
        return self._state.capture(progress)

    def _leave(self, error: BaseException | None, *, wait: bool) -> None:
        """Release all resources after an exception, as after a crash.

        The other ranks may be anywhere, so nothing is saved. The flusher commits sealed slots.
        """
        if self._life.is_over:
            return
        error = error or self._life.passing()
        if error is not None:
            self._life.failures.write(error)
        step, failure = self._loop.completed, self._loop.failure or type(error).__name__
        if not self._saver.has_staged(step):
            cause = failure.partition(":")[0]
            self._recorder.note(
                f"no last checkpoint after step {step}, because training ended: {cause}"
            )
        self._release(wait=wait)

    def _release(self, *, wait: bool, is_orderly: bool = False) -> None:
        """Release all resources. With `wait`, also wait until the session's own flusher has ended.

        Unless the end is orderly, the flusher commits the newest snapshot.
        """
        if self._life.is_over:
            return
        self._life.end()
        self._optimizers.close()
        self._state.close()
        if self._stop_coordinator is not None:
            self._stop_coordinator.close()
        # A copy that continues is journaled when it is complete.
        self._saver.complete_copy()
        if self._updates is not None:
            self._updates.close()
        self._recorder.close()
        self._saver.close(is_orderly=is_orderly)
        if self._flags is not None:
            self._flags.close()
        self._life.failures.close()
        self._context.close(wait=wait)
        # Last, because a service may not answer: everything else is saved and released.
        for sink in self._metrics.sinks:
            sink.close(is_orderly=is_orderly)
        release(self)
        if is_orderly:
            self._ranks.close()

    def _abandon(self) -> None:
        """Clean up after a failed constructor as after a crash, so that another can be created."""
        if hasattr(self, "_life"):
            self._life.end()
        for name in ("_updates", "_stop_coordinator", "_recorder", "_flags", "_optimizers"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        if hasattr(self, "_state"):
            self._state.close()
        if hasattr(self, "_saver"):
            self._saver.close(is_orderly=False)
        if hasattr(self, "_context"):
            self._context.close(wait=False)

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

    def __del__(self) -> None:
        """Release all resources of a session that the program dropped, as after a crash."""
        if hasattr(self, "_loop"):
            self._release(wait=False)
