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
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from holdfast.contracts.agreement import consider
from holdfast.contracts.board import NOWHERE, Phase, Proposal
from holdfast.contracts.errors import SpecError
from holdfast.contracts.journal import EventKind
from holdfast.trainer.boundary import Captured, Saver
from holdfast.trainer.data.order import Batch
from holdfast.trainer.data.position import Position
from holdfast.trainer.data.sampler import ElasticDistributedSampler, ElasticSampler
from holdfast.trainer.link import Link, meet_ranks, open_link
from holdfast.trainer.loading.restore import chosen_interval, chosen_snapshots, resume
from holdfast.trainer.metrics import improved, open_recorder
from holdfast.trainer.numerics.guard import LossGuard
from holdfast.trainer.pacing.cadence import Interval
from holdfast.trainer.pacing.pace import Pace
from holdfast.trainer.settler import Settler
from holdfast.trainer.signals import (
    FailureRecord,
    SignalFlags,
    end_deaf_helpers_at_exit,
    ignore_stop_signals,
)
from holdfast.trainer.staging.snapshots import SnapshotRhythm
from holdfast.trainer.state.fit import Fit
from holdfast.trainer.state.train_state import Progress, Stateful, TrainState, listed

NOTICE: Final = "notice"
BETTER: Final = ("min", "max")
SLOW_PHASES: Final = {
    phase.name.lower(): phase for phase in (Phase.LOAD, Phase.COMPILE, Phase.EVAL, Phase.SAVE)
}


class Session:
    """One rank's part of a fault-tolerant run. Every rank makes one and uses it alike.

    Also a context manager: leaving it by an exception saves nothing, records the traceback for
    torchrun, and lets the exception go on.
    """

    best: dict[str, Any]
    should_stop = False
    _completed = 0
    _total: int | None = None
    _is_checkpoint_wanted = _is_inside_step = _is_finished = _is_closed = False

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
        `CheckpointError` when the checkpoint does not fit the program.
        """
        if best is not None and best[1] not in BETTER:
            raise SpecError(f"best={best!r}: expected a metric's name and one of {BETTER}")
        chosen, rhythm = chosen_interval(interval), chosen_snapshots(snapshots)
        self.seed, self._best_of = seed, best
        self._failures = FailureRecord()
        self._ranks = meet_ranks()
        self._link: Link = open_link(directory, self._ranks, mesh)
        identity = self._link.identity
        self._appear()
        self._state = TrainState(
            model,
            listed(optimizer),
            listed(scheduler),
            extra,
            per_rank=per_rank,
            fit=Fit.of(strict=strict, rename=rename, exclude=exclude),
            rank=identity.rank,
            world_size=identity.world_size,
        )
        self._recorder = open_recorder(self._link, self._ranks.rank)
        self._resume(chosen, rhythm, planner)
        atexit.register(self._at_exit)
        end_deaf_helpers_at_exit()

    # --- where training stands ------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps that are complete; the one under way is the next."""
        return self._completed

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the next step's data; that of the checkpoint after a resume."""
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
        return self._link.run.directory

    @property
    def stop_requested(self) -> bool:
        """True once a stop is wanted. Ranks see it at slightly different times: a slow phase may
        be cut short by it, but only where no collective depends on that."""
        return self._link.board.stopping

    # --- the loop -------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Steps to do, counted from 1: from the one after the restored step up to `total`.

        A step is complete when the loop asks for the next. Ends early once all ranks agreed to
        stop; the last checkpoint is committed by then. Raises `SaveError` when it could not be.
        """
        self._total = total
        if self._completed < total and self._enter():
            return
        while self._completed < total:
            self._is_inside_step = True
            yield self._completed + 1
            self._is_inside_step = False
            if self.boundary():
                return
        self._finish()

    def boundary(self) -> bool:
        """Say that one more optimizer step is complete; True when this rank must leave now.

        For loops that cannot be written over `steps`. Saves when a checkpoint is due. When it
        returns True the last checkpoint has been committed.
        """
        self._completed += 1
        step, pace, saver = self._completed, self._pace, self._saver
        pace.meter.leave(time.monotonic(), is_flushing=bool(saver.in_flight))
        if saver.in_flight:
            saver.collect()
        self._guard.look()
        if self._is_checkpoint_wanted or pace.cadence.is_due(step):
            self._meet(step)
            pace.meter.enter(time.monotonic())
        elif pace.rhythm.is_due(step):
            saver.snapshot(step)
            pace.meter.enter(time.monotonic())
        if self._record.cross(step):
            self._consider(step)
        return self.should_stop

    def checkpoint(self) -> None:
        """Ask for a checkpoint at the end of this step; every rank must ask alike."""
        self._is_checkpoint_wanted = True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Session]:
        """Say that a slow phase runs: "eval", "compile", "load" or "save".

        Its silence is judged by how long it took before; `beat` within it ends a silence.
        """
        if name not in SLOW_PHASES:
            raise SpecError(f"phase {name!r}: expected one of {sorted(SLOW_PHASES)}")
        before = self._record.phase
        self._record.beat(SLOW_PHASES[name])
        try:
            yield self
        finally:
            self._record.beat(before)

    def beat(self) -> None:
        """Say that this rank lives, from within a slow phase."""
        self._record.beat(self._record.phase)

    # --- data -----------------------------------------------------------------------------

    def batch(self, dataset_size: int, global_batch: int) -> Batch:
        """This rank's sample ids of the step under way, shape (global_batch / parts,), int64.

        There are as many parts as ranks, fewer where a mesh says that ranks work on the same. A
        function of (seed, step, global batch, recorded skip windows): together the ranks see the
        same samples at every rank count. Raises `SpecError` on a split that is not even.
        """
        return self._position.batch(dataset_size, global_batch)

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
        step = self._completed + 1
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
        self._guard.observe(self._completed + 1, loss)

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
            if not self._is_finished and not self._is_inside_step:
                self._finish()
            else:
                self._saver.wait()
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
        # The other ranks may be anywhere: nothing that waits for them can be done now. What is
        # sealed is committed by the flusher.
        self._failures.write(error)
        self._release(wait=False)

    # --- inside ---------------------------------------------------------------------------

    def _appear(self) -> None:
        """Be seen on the node's board; without an agent, be told of signals."""
        identity = self._link.identity
        self._record = self._link.board.record(identity.local_rank)
        self._record.register(identity.rank, NOWHERE)
        self._flags = None if self._link.has_agent else SignalFlags(self._record)
        self._record.beat(Phase.LOAD)

    def _resume(
        self, interval: Interval, rhythm: SnapshotRhythm, planner: SavePlanner | None
    ) -> None:
        """Take over the newest believable checkpoint; prepare the saves and stops to come."""
        self._saver = Saver(
            self._link,
            self._ranks,
            self._record,
            self._recorder,
            capture=self._capture,
            planner=planner,
        )
        found = resume(self._link, self._ranks, self._saver.engine, self._state, self._recorder)
        self._saver.began_at(found.step, found.checkpoint)
        self.best, self.resumed_from = found.best, found.checkpoint
        self._completed = found.step
        self._position = Position(
            rank=self._link.data_part,
            world_size=self._link.data_parts,
            seed=self.seed,
            skips=found.skips,
            former=found.data,
            completed=lambda: self._completed,
        )
        self._guard = LossGuard(
            self._link, self._ranks, self._record, self._position, self._saver, self._state
        )
        self._pace = Pace(
            interval,
            rhythm,
            step=found.step,
            link=self._link,
            saver=self._saver,
            recorder=self._recorder,
        )
        self._record.register(self.rank, found.step)
        self._saver.prepare()
        settles = not self._link.has_agent and self._link.identity.local_rank == 0
        self._settler = Settler(self._link, self._note) if settles else None
        # What the program still does before its first step is its own loading.
        self._record.beat(Phase.LOAD)

    def _note(self, kind: Any, **data: Any) -> None:
        if self._recorder is not None:
            identity = self._link.identity
            facts: dict[str, Any] = {
                "attempt": identity.attempt,
                "incarnation": identity.incarnation,
            }
            self._recorder.event(kind, **facts, **data)

    def _enter(self) -> bool:
        """The boundary before the first step of this incarnation; True to leave already."""
        self._state.rewind_generators()
        # The first step compiles and warms up: its silence is judged by another measure.
        if self._record.cross(self._completed, Phase.COMPILE):
            self._consider(self._completed)
        return self.should_stop

    def _consider(self, step: int) -> None:
        word = consider(self._link.board, self._record, step)
        if word is Proposal.GO:
            self.should_stop = True
            self._finish()
        elif word is Proposal.SAVE and not self._saver.has_staged(step):
            self._meet(step, NOTICE)
            self._pace.meter.enter(time.monotonic())
            # The save's phase ends here: the boundary itself was crossed before it.
            self._record.beat(Phase.TRAIN)

    def _capture(self) -> Captured:
        progress = Progress(
            step=self._completed,
            seed=self.seed,
            epoch=self.epoch,
            data=self._position.describe(),
            best=self.best,
        )
        return self._state.capture(progress)

    def _meet(self, step: int, asked: str = "") -> None:
        """An agreed step: all ranks learn whether to save now, and when to meet again.

        `asked` is the reason of a save that all of them were asked for.
        """
        if self._is_checkpoint_wanted:
            asked, self._is_checkpoint_wanted = "request", False
        wanted = bool(asked)
        cadence, saver = self._pace.cadence, self._saver
        decision = (False, 0)
        if self.rank == 0:
            # Asked for between two agreed steps, a checkpoint does not move the next of them.
            is_due = cadence.is_due(step)
            now = time.monotonic()
            decision = cadence.decide(step, now) if is_due else (wanted, cadence.next_step)
        mine = [decision[0] or wanted, decision[1], saver.is_busy, saver.look(), self._guard.asked]
        said = self._ranks.largest([*mine, *self._pace.figures()])
        save, next_step, is_busy, fitness, bad_step, copy_us, step_us = said
        if bad_step:
            self._guard.settle()
            # They were called together for the loss: a cloud's notice is followed by a stop.
            save = save if asked != NOTICE else 0
        saved = bool(save) and not is_busy
        if saved:
            saver.make_fit(fitness)
            saver.save(step=step, reason=asked or "interval")
        elif save:
            saver.passed_over(step)
        if not saved and self._pace.rhythm.is_due(step):
            saver.snapshot(step)
        saver.forget()
        self._pace.settle(copy_us, step_us, saved=saved)
        cadence.settle(step, next_step, saved=saved, now=time.monotonic())

    def _finish(self) -> None:
        """The last save of this incarnation, committed; then say how it ended."""
        self._is_finished = True
        self._guard.finish()
        if (
            not self._saver.has_staged(self._completed)
            and self._ranks.largest([self._guard.asked])[0]
        ):
            self._guard.settle()
        self._saver.finish(step=self._completed)
        self._note(EventKind.NOTE, text=f"left after step {self._completed}", has_left=True)
        is_stopped = self.should_stop and (self._total is None or self._completed < self._total)
        self._record.beat(Phase.STOP if is_stopped else Phase.DONE)
        if self.should_stop and not self._link.has_agent and self.rank == 0:
            self._link.run.stop_file.unlink(missing_ok=True)

    def _release(self, *, wait: bool, is_orderly: bool = False) -> None:
        """Let everything go; with `wait`, also wait for a flusher of our own to end.

        Unless the end is orderly, the flusher commits the newest snapshot.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        if self._settler is not None:
            self._settler.close()
        if self._recorder is not None:
            self._recorder.close()
        self._saver.close(is_orderly=is_orderly)
        if self._flags is not None:
            self._flags.close()
        self._failures.close()
        self._link.close(wait=wait)
        if is_orderly:
            self._ranks.close()

    def _at_exit(self) -> None:
        """A program that ends without `close` still gets its journal lines and metrics."""
        self._release(wait=False)
