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
    """One rank's part of a fault-tolerant run. Create it with the same arguments on every rank.

    A session is also a context manager. If the body raises, the session saves nothing, records the
    traceback for torchrun and re-raises the exception.
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
        """Resume the run unconditionally. Call this after the model is sharded and moved.

        Args:
            model: a plain, DDP, FSDP2 or compiled module, saved under its canonical names. A
                sequence holds the parts of one model, whose names must not overlap.
            optimizer: one, several, or none.
            scheduler: objects with `state_dict` and `load_state_dict`: one, several, or none.
            extra: further objects with the same state on all ranks (an EMA, a GradScaler).
            per_rank: objects with a different state on each rank (a loader, a `torch.Generator`).
                They are restored only at the same world size.
            seed: orders the data, and seeds ranks that have no saved random state.
            interval: time between checkpoints: steps (50), seconds ("300s", "10m") or "auto". The
                run's spec has precedence.
            directory: the run's folder if there is no agent. The default is
                `$HOLDFAST_ROOT/<script>` or, without that variable, `./runs/<script>`.
            best: a logged metric whose best value is kept, as ("eval_loss", "min").
            mesh: a device mesh of all ranks. Each stage of its dimension "pp" saves into its own
                folder. Ranks along "pp", "tp", "cp" and "sp" get the same samples.
            strict: refuse a checkpoint whose keys differ from the program's keys.
            rename, exclude: saved names mapped to new names, and parts that are not loaded, for a
                checkpoint that does not fit the program. See `Fit`.
            snapshots: steps between copies in memory, "auto" or "off". The spec has precedence.
            planner: a `SavePlanner` of torch, which all ranks call at every save. It costs its
                collectives and disables snapshots. `rename` must reverse any name it changes.

        Raises `PreflightError` if the process group or the flusher is missing, `CheckpointError`
        if the checkpoint does not fit the program, and `SessionError` if this process already has
        an open Session.
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
        """The number of complete optimizer steps. The current step is the next one."""
        return self._loop.completed

    @property
    def epoch(self) -> int:
        """The current epoch of a loop over `epochs`, counted from 0.

        Without such a loop: the epoch of the next step's data, or after a resume the checkpoint's.
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
        """The run's folder. The program may keep its own files there."""
        return self._context.run.directory

    @property
    def should_stop(self) -> bool:
        """True after all ranks agreed to stop and the last checkpoint was committed."""
        return self._loop.should_stop

    @property
    def stop_requested(self) -> bool:
        """True after a stop was requested. Ranks see this at slightly different times, so use it
        to shorten a slow phase only where no collective depends on the result."""
        return self._context.status_table.stopping

    # --- the loop -------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Yield the step numbers, from the step after the restored one up to `total`.

        Steps count from 1. A step is complete when the loop asks for the next one. The iterator
        ends early after all ranks agreed to stop and the last checkpoint was committed. Raises
        `SaveError` if the last checkpoint could not be committed.
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
        """Yield the epoch numbers, from the first unfinished epoch up to `total` - 1.

        Epochs count from 0. The code after an epoch's last step (evaluation, a scheduler's step,
        `checkpoint`) is the epoch's end. The end is complete when the loop asks for the next epoch.
        A resume from a checkpoint that was saved before that runs the end again, without steps if
        none are left. The iterator ends early after all ranks agreed to stop. Then `should_stop`
        is true and the loop must skip the epoch's end. Raises `SaveError` if the last checkpoint
        could not be committed.
        """
        loop, position = self._loop, self._position
        loop.promise(epochs=total)
        if position.open_epoch is None:
            position.open_epoch, position.in_epoch = self._began_in
        # In an epoch that had already begun, the loader's iterator had already been created.
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
        """Yield the batches of `loader`. Each batch is one step.

        A step is complete when the loop asks for the next batch. The iterator ends early after all
        ranks agreed to stop. Raises `SpecError` if `loader` is a DataLoader with an order of its
        own and no state.
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
        """Mark one more optimizer step as complete. Return True if this rank must leave now.

        Use it in loops that cannot iterate over `steps`. It saves when a checkpoint is due. When it
        returns True, the last checkpoint has been committed.
        """
        return self._loop.boundary()

    def checkpoint(self) -> None:
        """Request a checkpoint at the end of this step. Every rank must call this."""
        self._loop.is_checkpoint_wanted = True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Session]:
        """Mark a slow phase: "eval", "compile", "load" or "save".

        The limit of silence depends on how long the phase took before. `beat` resets the silence.
        Raises `SpecError` for any other name.
        """
        with self._loop.phase(name):
            yield self

    def beat(self) -> None:
        """Report that this rank is alive, from within a slow phase."""
        self._record.beat(self._record.phase)

    # --- data -----------------------------------------------------------------------------

    def batch(self, dataset_size: int, global_batch: int, *, ahead: int = 0) -> Batch:
        """Return this rank's sample ids of the current step, shape (global_batch / parts,), int64.

        With `ahead`, return those of a later step, for a program that fetches before it trains. The
        number of parts is the number of ranks, or less if a mesh gives several ranks the same data.
        The ids depend only on the seed, the step, the global batch and the recorded skip windows.
        All ranks together see the same samples at every rank count. Raises `SpecError` if the
        global batch does not divide evenly or is larger than the dataset.
        """
        return self._position.batch(dataset_size, global_batch, ahead)

    def sampler(self, dataset_size: int, global_batch: int, total: int) -> ElasticSampler:
        """Return a `batch_sampler` for a DataLoader, with the ids of `batch` for each step.

        An iteration begins with the current step. It also works with `StatefulDataLoader`.
        """
        return self._position.sampler(dataset_size, global_batch, total)

    def distributed_sampler(
        self, dataset_size: int, global_batch: int, *, batch_size: int | None = None
    ) -> ElasticDistributedSampler:
        """Return a DataLoader `sampler` that replaces torch's `DistributedSampler`.

        An iteration yields this rank's remaining ids of the epoch, one by one. `batch_size` is the
        loader's: global_batch / ranks, or a divisor of it for gradient accumulation. Raises
        `SpecError` if `batch_size` does not divide global_batch / ranks.
        """
        return self._position.distributed_sampler(dataset_size, global_batch, batch_size)

    @staticmethod
    def worker_init(_worker: int) -> None:
        """Protect a DataLoader's workers from stop signals. Pass this as `worker_init_fn`.

        torchrun sends these signals to whole process groups. Workers still end when the loader or
        the rank ends, even if the loader is in use when the program ends. Under an agent, workers
        always ignore these signals.
        """
        ignore_stop_signals()

    # --- metrics --------------------------------------------------------------------------

    def log(self, **values: float) -> None:
        """Record metrics of the current step. Rank 0 writes its values in the background."""
        step = self._loop.step_under_way
        self.best = improved(self.best, self._best_of, values, step)
        if self._guard.metric in values:
            self._guard.observe(step, values[self._guard.metric])
        if self._recorder is not None:
            self._recorder.log(step, values)

    def observe(self, loss: float | Tensor) -> None:
        """Check this rank's loss of the current step, without waiting for the GPU.

        `log` does this for a metric named `loss`. The spec's `supervision.numerics` sets what
        happens if the loss is not finite or far above earlier losses.
        """
        self._guard.observe(self.step + 1, loss)

    # --- the end --------------------------------------------------------------------------

    def close(self) -> None:
        """Save the last step if needed, wait until it is committed, and release all resources.

        A loop that was left in the middle of a step saves nothing, because that state belongs to
        no step. Raises `SaveError` if the last checkpoint could not be committed.
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
        # The other ranks may be anywhere, so do not wait. The flusher commits sealed slots.
        self._failures.write(error)
        self._release(wait=False)

    # --- inside ---------------------------------------------------------------------------

    def _appear(self) -> None:
        """Register in the node's status table. Without an agent, also install signal handlers."""
        identity = self._context.identity
        self._record = self._context.status_table.record(identity.local_rank)
        self._record.register(identity.rank, NOWHERE)
        self._flags = None if self._context.has_agent else SignalFlags(self._record)
        self._record.beat(Phase.LOAD)

    def _begin(self, *, is_last: bool) -> None:
        """Restore the random generators to their resumed state before the first step."""
        self._loop.warn_of_draws(self._state.rewind_generators(is_last=is_last))

    def _resume(
        self, interval: Interval, rhythm: SnapshotRhythm, planner: SavePlanner | None
    ) -> None:
        """Restore the newest checkpoint that verifies. Prepare later saves and stops."""
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
        coordinates = not self._context.has_agent and self._context.identity.local_rank == 0
        self._stop_coordinator = (
            StopCoordinator(self._context, self._loop.note) if coordinates else None
        )
        # Work that the program still does before its first step counts as loading.
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
        """Release all resources. With `wait`, also wait until the session's own flusher has ended.

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
        """Clean up after a failed constructor as after a crash, so that another can be created."""
        for name in ("_stop_coordinator", "_recorder", "_flags"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        if hasattr(self, "_saver"):
            self._saver.close(is_orderly=False)
        if hasattr(self, "_context"):
            self._context.close(wait=False)

    def _at_exit(self) -> None:
        """Write the journal lines and metrics of a program that ends without `close`."""
        self._release(wait=False)
