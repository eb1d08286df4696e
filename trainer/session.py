"""`Session`: what makes a plain torchrun loop fault tolerant.

    session = Session(model, optimizer, scheduler, extra={"ema": ema}, seed=0)
    for step in session.steps(total):
        ids = session.batch(len(dataset), global_batch=64)
        …one optimizer step…
        session.log(loss=loss.item())
    session.close()

Constructing it resumes from the newest believable checkpoint. `steps` counts from 1 and goes on
after the restored step; between steps it saves when that is due, and it ends early when all ranks
agreed to stop, with a last checkpoint committed. It works the same under an agent, under plain
torchrun and in a single process.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from holdfast.contracts.errors import SpecError
from holdfast.contracts.rank_status import NOWHERE, Phase
from holdfast.trainer import alone
from holdfast.trainer.data.order import Batch
from holdfast.trainer.data.position import Position
from holdfast.trainer.data.sampler import (
    ElasticDistributedSampler,
    ElasticSampler,
    check_order,
)
from holdfast.trainer.loading.restore import chosen_interval, chosen_snapshots, resume
from holdfast.trainer.loop import Loop
from holdfast.trainer.metrics import improved, open_recorder
from holdfast.trainer.numerics.guard import LossGuard
from holdfast.trainer.pacing.cadence import Interval
from holdfast.trainer.pacing.pace import Pace
from holdfast.trainer.rank_context import RankContext, open_control_group, open_rank_context
from holdfast.trainer.saver import Captured, Saver
from holdfast.trainer.signals import (
    FailureRecord,
    SignalFlags,
    end_deaf_helpers_at_exit,
    ignore_stop_signals,
)
from holdfast.trainer.staging.snapshots import SnapshotRhythm
from holdfast.trainer.state.fit import Fit
from holdfast.trainer.state.train_state import Progress, Stateful, TrainState, listed
from holdfast.trainer.stop_coordinator import StopCoordinator

T = TypeVar("T")
BETTER: Final = ("min", "max")


class Session:
    """One rank's part of a fault-tolerant run. Every rank makes one and uses it alike.

    Also a context manager: leaving it by an exception saves nothing, records the traceback for
    torchrun, and lets the exception go on.
    """

    best: dict[str, Any]
    _is_closed = False

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        seed: int = 0,
        interval: int | str = "auto",
        directory: str | Path | None = None,
        best: tuple[str, str] | None = None,
        mesh: DeviceMesh | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        exclude: str | Sequence[str] = (),
        snapshots: int | str = "auto",
        planner: SavePlanner | None = None,
    ) -> None:
        """Resumes here, unconditionally: make it after the model is sharded and moved.

        Args:
            model: plain, DDP, FSDP2, compiled; saved under its canonical names. Several are the
                parts of one model, with names of their own.
            optimizer: one, several, or none.
            scheduler: anything with `state_dict` and `load_state_dict`; one, several, or none.
            extra: further objects with a state, the same on all ranks (an EMA, a GradScaler).
            per_rank: objects with a state of each rank's own, restored at the same world size
                only (a loader, a `torch.Generator`).
            seed: orders the data, and seeds ranks that have no saved random state.
            interval: steps (50), seconds ("300s", "10m") or "auto" between checkpoints; the
                run's spec has precedence.
            directory: the run's folder when there is no agent; else `$HOLDFAST_ROOT/<script>`,
                else `./runs/<script>`.
            best: a logged metric whose best value is kept, as ("eval_loss", "min").
            mesh: of all ranks; each stage of its dimension "pp" saves into a folder of its own,
                and along "pp", "tp", "cp" and "sp" ranks get the same samples.
            strict: refuse a checkpoint with keys that the program lacks, or the reverse.
            rename, exclude: saved names to new ones, and parts left as they are, for the one
                checkpoint that does not fit; see `Fit`.
            snapshots: steps between copies in memory, "auto" or "off"; the spec has precedence.
            planner: a `SavePlanner` of torch's, asked at every save with all ranks, which costs
                its collectives and has no snapshots; what it renames, `rename` gives back.

        Raises `PreflightError` when the process group or the flusher is missing,
        `CheckpointError` when the checkpoint does not fit the program, `SessionError` when this
        process has a Session that was not closed.
        """
        if best is not None and best[1] not in BETTER:
            raise SpecError(f"best={best!r}: expected a metric's name and one of {BETTER}")
        chosen, rhythm = chosen_interval(interval), chosen_snapshots(snapshots)
        self.seed, self._best_of = seed, best
        with alone.claimed(self, self._abandon):
            self._failures = FailureRecord()
            self._ranks = open_control_group()
            self._context: RankContext = open_rank_context(directory, self._ranks, mesh)
            self._appear()
            self._state = TrainState(
                model,
                listed(optimizer),
                listed(scheduler),
                extra,
                per_rank=per_rank,
                fit=Fit.of(strict=strict, rename=rename, exclude=exclude),
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
            )
            self._recorder = open_recorder(self._context, self._ranks.rank)
            self._resume(chosen, rhythm, planner)
        end_deaf_helpers_at_exit()

    # --- where training stands ------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps that are complete; the one under way is the next."""
        return self._loop.completed

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that a loop over `epochs` is in.

        Without such a loop, that of the next step's data, or of the checkpoint after a resume.
        """
        return self._position.epoch

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    @property
    def run_directory(self) -> Path:
        """The run's folder: the program may keep files of its own there."""
        return self._context.run.directory

    @property
    def should_stop(self) -> bool:
        """True once all ranks agreed to stop, and the last checkpoint has been committed."""
        return self._loop.should_stop

    @property
    def stop_requested(self) -> bool:
        """True once a stop is wanted. Ranks see it at slightly different times: a slow phase may
        be cut short by it, but only where no collective depends on that."""
        return self._context.status_table.stopping

    # --- the loop -------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Steps to do, counted from 1: from the one after the restored step up to `total`.

        A step is complete when the loop asks for the next. Ends early once all ranks agreed to
        stop; the last checkpoint is committed by then. Raises `SaveError` when it could not be.
        """
        loop = self._loop
        if loop.epochs is None:
            loop.promise(steps=total)
        if loop.completed < total:
            self._begin(is_last=True)
            if loop.enter():
                return
        while loop.completed < total:
            loop.is_inside_step = True
            yield loop.completed + 1
            loop.is_inside_step = False
            if loop.boundary():
                return
        if loop.epochs is None:
            loop.finish()

    def epochs(self, total: int) -> Iterator[int]:
        """Epochs to do, counted from 0: from the one that is not finished yet up to `total` - 1.

        What the loop's body does after the last step of an epoch (evaluation, a scheduler's step,
        `checkpoint`) is the epoch's end. The end has been passed when the loop asks for the next
        epoch. A resume from a checkpoint that was saved before that runs the end again, with no
        steps before it where there are none left. Ends early once all ranks agreed to stop: then
        `should_stop` is true and the end must be left out. Raises `SaveError` when the last
        checkpoint could not be committed.
        """
        loop, position = self._loop, self._position
        loop.promise(epochs=total)
        if position.open_epoch is None:
            position.open_epoch, position.in_epoch = self._began_in
        # Of an epoch that had begun, the loader's iterator had been made.
        self._begin(is_last=not position.in_epoch)
        if loop.enter():
            return
        while (epoch := position.epoch) < total:
            yield epoch
            loop.require_between_steps()
            if loop.finish_epoch():
                return
        loop.finish()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of `loader`, each of which is one step.

        A step is complete when the loop asks for the next batch. Ends early once all ranks agreed
        to stop. Raises `SpecError` for a DataLoader with an order of its own and no state.
        """
        loop = self._loop
        check_order(loader)
        loop.require_between_steps()
        batches = iter(loader)
        self._begin(is_last=True)
        if loop.enter():
            return
        for batch in batches:
            loop.is_inside_step = True
            yield batch
            loop.is_inside_step = False
            if loop.boundary():
                return
        loop.is_at_end = loop.epochs is not None

    def boundary(self) -> bool:
        """Say that one more optimizer step is complete; True when this rank must leave now.

        For loops that cannot be written over `steps`. Saves when a checkpoint is due. When it
        returns True the last checkpoint has been committed.
        """
        return self._loop.boundary()

    def checkpoint(self) -> None:
        """Ask for a checkpoint at the end of this step; every rank must ask alike."""
        self._loop.is_checkpoint_wanted = True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Session]:
        """Say that a slow phase runs: "eval", "compile", "load" or "save".

        Its silence is judged by how long it took before; `beat` within it ends a silence.
        Raises `SpecError` for another name.
        """
        with self._loop.phase(name):
            yield self

    def beat(self) -> None:
        """Say that this rank lives, from within a slow phase."""
        self._record.beat(self._record.phase)

    # --- data -----------------------------------------------------------------------------

    def batch(self, dataset_size: int, global_batch: int, *, ahead: int = 0) -> Batch:
        """This rank's sample ids of the step under way, shape (global_batch / parts,), int64.

        With `ahead` they are those of a later step, for a program that fetches before it trains.
        There are as many parts as ranks, fewer where a mesh says that ranks work on the same. A
        function of (seed, step, global batch, recorded skip windows): together the ranks see the
        same samples at every rank count. Raises `SpecError` on a split that is not even, and on a
        dataset smaller than the global batch.
        """
        return self._position.batch(dataset_size, global_batch, ahead)

    def sampler(self, dataset_size: int, global_batch: int, total: int) -> ElasticSampler:
        """The same ids for a DataLoader: give it as `batch_sampler`, one batch for each step.

        An iteration begins with the step under way. Suits torchdata's `StatefulDataLoader` too.
        """
        return self._position.sampler(dataset_size, global_batch, total)

    def distributed_sampler(
        self, dataset_size: int, global_batch: int, *, batch_size: int | None = None
    ) -> ElasticDistributedSampler:
        """In place of torch's `DistributedSampler`: give it as a DataLoader's `sampler`.

        An iteration gives this rank's single ids of what is left of the epoch. `batch_size` is
        the loader's: global_batch / ranks, or less for gradient accumulation. Raises `SpecError`
        when it does not divide that.
        """
        return self._position.distributed_sampler(dataset_size, global_batch, batch_size)

    @staticmethod
    def worker_init(_worker: int) -> None:
        """Give it as a DataLoader's `worker_init_fn`: stop signals must not kill its workers.

        torchrun sends them to whole process groups. Workers still end when the loader or the
        rank does, also where the loader is still in use at the program's end. Under an
        agent they ignore these signals in any case.
        """
        ignore_stop_signals()

    # --- metrics --------------------------------------------------------------------------

    def log(self, **values: float) -> None:
        """Note metrics of the step under way; rank 0's are written, beside training."""
        step = self._loop.step_under_way
        self.best = improved(self.best, self._best_of, values, step)
        if self._guard.metric in values:
            self._guard.observe(step, values[self._guard.metric])
        if self._recorder is not None:
            self._recorder.log(step, values)

    def observe(self, loss: float | Tensor) -> None:
        """Have this rank's loss of the step under way watched, without waiting for the GPU.

        `log` does it for a metric by the name of `loss`. What comes of one that is not finite, or
        far above those before it, says the spec's `supervision.numerics`.
        """
        self._guard.observe(self.step + 1, loss)

    # --- the end --------------------------------------------------------------------------

    def close(self) -> None:
        """Save what is not saved yet, wait until it is committed, and let everything go.

        A loop that was left in the middle of a step saves nothing: that state belongs to no
        step. Raises `SaveError` when the last checkpoint could not be committed.
        """
        if self._is_closed:
            return
        is_orderly = False
        try:
            if not self._loop.is_finished and not self._loop.is_inside_step:
                self._loop.finish()
            else:
                self._saver.wait()
                self._loop.note_end()
            is_orderly = True
        finally:
            self._release(wait=True, is_orderly=is_orderly)

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
            return
        # The other ranks may be anywhere: wait for none. The flusher commits what is sealed.
        self._failures.write(error)
        self._release(wait=False)

    # --- inside ---------------------------------------------------------------------------

    def _appear(self) -> None:
        """Be seen on the node's status table; without an agent, be told of signals."""
        identity = self._context.identity
        self._record = self._context.status_table.record(identity.local_rank)
        self._record.register(identity.rank, NOWHERE)
        self._flags = None if self._context.has_agent else SignalFlags(self._record)
        self._record.beat(Phase.LOAD)

    def _begin(self, *, is_last: bool) -> None:
        """Before the first step: the random generators are put where the resume left them."""
        self._loop.warn_of_draws(self._state.rewind_generators(is_last=is_last))

    def _resume(
        self, interval: Interval, rhythm: SnapshotRhythm, planner: SavePlanner | None
    ) -> None:
        """Take over the newest believable checkpoint; prepare the saves and stops to come."""
        self._saver = Saver(
            self._context,
            self._ranks,
            self._record,
            self._recorder,
            capture=self._capture,
            note_forms=self._state.note_forms,
            planner=planner,
        )
        found = resume(self._context, self._ranks, self._state, self._recorder)
        self._saver.began_at(found.step, found.checkpoint, found.manifest)
        self.best, self.resumed_from = found.best, found.checkpoint
        self._began_in = found.epoch, found.in_epoch
        self._position = Position(
            rank=self._context.data_part,
            world_size=self._context.data_parts,
            seed=self.seed,
            skips=found.skips,
            former=found.data,
            completed=found.step,
            epoch=found.epoch if found.in_epoch else None,
            begins=self._state.rewind_seeds,
        )
        self._guard = LossGuard(
            self._context, self._ranks, self._record, self._position, self._saver, self._state
        )
        awaits_state = bool(self._ranks.largest([self._state.awaits_first_step])[0])
        pace = Pace(
            interval,
            rhythm,
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
        )
        self._record.register(self.rank, found.step)
        self._saver.begin(awaits_state=awaits_state)
        settles = not self._context.has_agent and self._context.identity.local_rank == 0
        self._stop_coordinator = (
            StopCoordinator(self._context, self._loop.note) if settles else None
        )
        # What the program still does before its first step is its own loading.
        self._record.beat(Phase.LOAD)
        atexit.register(self._at_exit)

    def _capture(self) -> Captured:
        progress = Progress(
            step=self.step,
            seed=self.seed,
            epoch=self.epoch,
            in_epoch=self._position.in_epoch,
            data=self._position.describe(),
            best=self.best,
        )
        return self._state.capture(progress)

    def _release(self, *, wait: bool, is_orderly: bool = False) -> None:
        """Let everything go; with `wait`, also wait for a flusher of our own to end.

        Unless the end is orderly, the flusher commits the newest snapshot.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        if self._stop_coordinator is not None:
            self._stop_coordinator.close()
        if self._recorder is not None:
            self._recorder.close()
        self._saver.close(is_orderly=is_orderly)
        if self._flags is not None:
            self._flags.close()
        self._failures.close()
        self._context.close(wait=wait)
        alone.release(self)
        if is_orderly:
            self._ranks.close()

    def _abandon(self) -> None:
        """The constructor failed: what it began ends as by a crash, and another one can be made."""
        for name in ("_stop_coordinator", "_recorder", "_flags"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        if hasattr(self, "_saver"):
            self._saver.close(is_orderly=False)
        if hasattr(self, "_context"):
            self._context.close(wait=False)

    def _at_exit(self) -> None:
        """A program that ends without `close` still gets its journal lines and metrics."""
        self._release(wait=False)
