"""The parts of a session: in which order they start, and in which order they are released."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import SessionError
from holdfast.contracts.node.rank_status import NOWHERE, Phase
from holdfast.contracts.node.reporting import report
from holdfast.trainer.data.position import Position
from holdfast.trainer.loading.restore import Load, Resumed, resume
from holdfast.trainer.metrics import BEST, open_recorder
from holdfast.trainer.numerics.guard import LossGuard
from holdfast.trainer.pacing.pace import Pace
from holdfast.trainer.process import child_signals
from holdfast.trainer.process.signals import FailureRecord, SignalFlags
from holdfast.trainer.ranks import forks
from holdfast.trainer.ranks.rank_context import RankContext, open_control_group, open_rank_context
from holdfast.trainer.saving.saver import Captured, Saver
from holdfast.trainer.session import alone
from holdfast.trainer.session.loop import Loop
from holdfast.trainer.session.settings import Settings
from holdfast.trainer.session.stop_coordinator import StopCoordinator
from holdfast.trainer.session.updates import UpdateHook
from holdfast.trainer.state.made_with import changes
from holdfast.trainer.state.optimizer_steps import OptimizerSteps
from holdfast.trainer.state.run_state import (
    LOSSES,
    MADE_WITH,
    STEPS_IN_EPOCH,
    ProgramState,
    TrainingProgress,
)
from holdfast.trainer.trackers.sink import TrackerSink

S = TypeVar("S", bound="SessionParts")
P = ParamSpec("P")
R = TypeVar("R")


def while_open(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let `method` raise `SessionError` after the session has ended, and in a forked child."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        # As `_require_open`, without two calls in each step.
        if self._is_closed or self._forks != forks.count:
            self._require_open(method.__name__)
        return method(self, *args, **options)

    return call


class SessionParts:
    """What `Session` is made of. The session itself makes the state and says how to load it."""

    seed: int
    best: dict[str, Any]
    resumed_from: str | None
    _state: ProgramState
    _stop_coordinator: StopCoordinator | None = None
    _updates: UpdateHook | None = None
    _sinks: list[TrackerSink]
    _is_closed = False
    # Where a run begins that has no checkpoint, see `FrameworkSession`.
    _start_from: Path | None = None
    _begins_at = 0
    # The last step whose loss `observe` was given.
    _observed = 0
    _best_of: tuple[str, str] | None
    _optimizers: OptimizerSteps
    # The values with which the program made optimizers and schedulers, see `made_with`.
    _made_with: dict[str, Any]
    # The exception that the program handled when its loop began, which is none of the loop's.
    _around: int | None = None

    def _join(self, directory: str | Path | None, mesh: DeviceMesh | None) -> None:
        """Join the other ranks, and register in the node's status table."""
        # After torch's own hook at exit: a loader may start its workers while it is restored, and
        # fail.
        child_signals.hold(())
        self._sinks, self._around = [], _handled()
        self._owner, self._forks = os.getpid(), forks.count
        self._failures = FailureRecord()
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
        self, state: ProgramState, open_saver: Callable[..., Saver], load: Load
    ) -> Resumed:
        """Restore the newest checkpoint that verifies. Return the resumed position."""
        self._state = state
        self._recorder = open_recorder(self._context)
        if self._best_of is not None and self._ranks.rank == 0:
            self._recorder.watch.want(BEST, self._best_of[0])
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
        self.best = found.best if self._is_of(found.best) else {}
        if found.best and not self.best and self._best_of is not None:
            self._note(
                f"session.best begins again for {' '.join(self._best_of)}: the checkpoint has the "
                f"best {found.best.get('metric')}, {found.best.get('mode')}"
            )
        self._began_in = found.epoch, found.in_epoch
        self._note_changes(found.program.get(MADE_WITH, {}))
        self._position = Position(
            rank=self._context.data_part,
            world_size=self._context.data_parts,
            seed=self.seed,
            skips=found.skips,
            former=found.data,
            completed=found.step,
            epoch=found.epoch if found.in_epoch else None,
            steps_in_epoch=int(found.program.get(STEPS_IN_EPOCH, 0)),
            begins=self._state.rewind_seeds,
        )
        return found

    def _start(self, found: Resumed, settings: Settings) -> None:
        """Prepare the loop, its saves and its stops after the resumed position."""
        settings.announce(self._recorder.event, self._ranks.rank)
        self._guard = LossGuard(
            self._context, self._ranks, self._record, self._position, self._saver, self._state
        )
        self._guard.resume(map(float, found.program.get(LOSSES, ())))
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
        # Without a reference: a session that nothing uses any more is released, see `__del__`.
        self._at_exit = functools.partial(_release_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _enter_loop(self, *, is_last: bool) -> bool:
        """Restore the random generators and begin the loop. Return True to leave it at once."""
        self._around = _handled()
        self._loop.warn_of_draws(self._state.rewind_generators(is_last=is_last))
        return self._loop.enter()

    def _capture(self) -> Captured:
        progress = TrainingProgress(
            step=self._loop.completed,
            seed=self.seed,
            epoch=self._position.epoch,
            in_epoch=self._position.in_epoch,
            data=self._position.describe(),
            best=self.best,
            program={
                MADE_WITH: self._made_with,
                STEPS_IN_EPOCH: self._position.steps_in_epoch,
                LOSSES: self._guard.losses,
            },
        )
        return self._state.capture(progress)

    @property
    def has_failed(self) -> bool:
        """True if an exception ended training, so that `close` saves nothing.

        It came from a step boundary, or the program handles it now, as in a `finally` block.
        """
        return bool(self._loop.failure) or self._passing() is not None

    def _passing(self) -> BaseException | None:
        """Return the exception that passes from the program's loop to its caller, or None."""
        error = sys.exc_info()[1]
        is_exit = isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and error.code in (None, 0)
        )
        return error if self._is_handling and not is_exit else None

    @property
    def _is_handling(self) -> bool:
        """True while the program handles an exception that it did not handle before its loop."""
        return _handled() not in (None, self._around)

    def _leave(self, error: BaseException | None, *, wait: bool) -> None:
        """Release all resources after an exception, as after a crash.

        The other ranks may be anywhere, so nothing is saved. The flusher commits sealed slots.
        """
        if self._is_closed or self._is_in_child:
            return
        error = error or self._passing()
        if error is not None:
            self._failures.write(error)
        step, failure = self._loop.completed, self._loop.failure or type(error).__name__
        if not self._saver.has_staged(step):
            cause = failure.partition(":")[0]
            self._loop.note(
                f"no last checkpoint after step {step}, because training ended: {cause}"
            )
        self._release(wait=wait)

    def _require_open(self, name: str) -> None:
        """Raise `SessionError` if this session has ended, or if this process is a forked child."""
        if self._is_closed:
            raise SessionError(
                f"{name}: this Session has ended after step {self._loop.completed}, because it was "
                "closed. Call it before close() or the end of the with block; or create another "
                "Session, which continues from the newest checkpoint"
            )
        if self._is_in_child:
            raise SessionError(
                f"{name}: this process is a fork of the process {self._owner}, to which the "
                "Session belongs. Call it there, and send it what this process has found"
            )

    def _release(self, *, wait: bool, is_orderly: bool = False) -> None:
        """Release all resources. With `wait`, also wait until the session's own flusher has ended.

        Unless the end is orderly, the flusher commits the newest snapshot.
        """
        if self._is_closed or self._is_in_child:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
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
        self._failures.close()
        self._context.close(wait=wait)
        # Last, because a service may not answer: everything else is saved and released.
        for sink in self._sinks:
            sink.close(is_orderly=is_orderly)
        alone.release(self)
        if is_orderly:
            self._ranks.close()

    def _abandon(self) -> None:
        """Clean up after a failed constructor as after a crash, so that another can be created."""
        self._is_closed = True
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

    @property
    def _is_in_child(self) -> bool:
        """True in a forked child, which has no part in the session of its parent."""
        # Asking for the process id would be a system call in each step.
        return forks.count != self._forks

    def _is_of(self, best: dict[str, Any]) -> bool:
        """Return True if a restored best value is of the metric and the mode that now count."""
        now = self._best_of or (best.get("metric"), best.get("mode"))
        return (best.get("metric"), best.get("mode", now[1])) == now

    def _note_changes(self, former: dict[str, Any]) -> None:
        """Report optimizers and schedulers that the program made with other values than before."""
        changed = changes(former, self._made_with)
        if not changed:
            return
        text = (
            f"the program changed {', '.join(changed)}. The values of the checkpoint count. To "
            "use the new ones, set them after you create the Session. The page `Change a run` of "
            "the documentation shows how"
        )
        self._note(text)

    def _note(self, text: str) -> None:
        """Print and journal what a person should know."""
        if self._ranks.rank == 0:
            report(f"holdfast: {text}")
        self._recorder.event(EventKind.NOTE, text=text)

    def __del__(self) -> None:
        """Release all resources of a session that the program dropped, as after a crash."""
        if hasattr(self, "_loop"):
            self._release(wait=False)


def _release_at_exit(session: weakref.ref[SessionParts]) -> None:
    """Write the journal lines and metrics of a program that ends without `close`."""
    if (held := session()) is not None:
        held._release(wait=False)


def _handled() -> int | None:
    """Return the identity of the exception that is being handled, without keeping it alive."""
    error = sys.exc_info()[1]
    return None if error is None else id(error)
