"""The protocol of a session's loop: step boundaries, epoch ends and the end of the loop.

`Session` is the public interface. `Loop` decides which steps are complete, when ranks meet to save
and when they leave together.

An epoch's end (evaluation, a scheduler's step) comes after the boundary of its last step and before
the next step. A stop at that boundary leaves before the end, and the resume runs it. Any other save
that is due there waits until the end is complete, so that a checkpoint contains the metrics of its
own evaluation. Each checkpoint records its epoch and whether that epoch has begun.

The adapter of a framework that counts its own epochs reports an end with `boundary(has_end=True)`
and `finish_end`. Its own state then says whether the end has still to run.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import SaveError, SessionError, SpecError
from holdfast.contracts.node.agreement import consider
from holdfast.contracts.node.rank_status import Phase, Proposal, RankRecord
from holdfast.trainer.data.numbering import RESTARTED, has_restarted
from holdfast.trainer.data.position import Position
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.numerics.guard import LossGuard
from holdfast.trainer.pacing.cadence import MUST_SAVE
from holdfast.trainer.pacing.pace import Pace
from holdfast.trainer.process import devices
from holdfast.trainer.process.signals import SignalFlags
from holdfast.trainer.ranks.collective import ControlGroup
from holdfast.trainer.ranks.meeting import Boundary
from holdfast.trainer.ranks.paired_test import measure
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.saving.saver import Saver
from holdfast.trainer.state.optimizer_steps import OptimizerSteps

P = ParamSpec("P")
R = TypeVar("R")

NOTICE: Final = "notice"
DRAWN: Final = (
    "were drawn between the resume and the first step. The generators were reset to the resumed "
    "state, so the drawn numbers are lost: a batch that was fetched before the loop is not the "
    "batch of an uninterrupted run. Fetch each batch within its step, or use a generator of your "
    "own in per_rank"
)
SLOW_PHASES: Final = {
    phase.name.lower(): phase for phase in (Phase.LOAD, Phase.COMPILE, Phase.EVAL, Phase.SAVE)
}


def _part_of_training(
    method: Callable[Concatenate[Loop, P], R],
) -> Callable[Concatenate[Loop, P], R]:
    """Let an exception from `method` end training, unless only a save failed.

    The state may then be bad or half changed, and other ranks may be anywhere.
    """

    @functools.wraps(method)
    def call(self: Loop, /, *args: P.args, **options: P.kwargs) -> R:
        self.require_training()
        try:
            return method(self, *args, **options)
        except SaveError:
            raise
        except BaseException as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            raise

    return call


class Loop:
    """One rank's loop: the complete steps, and the actions at the end of each step.

    `total` is the number of steps that the program wants, `epochs` the number of epochs. Each is
    None until the program sets it.
    """

    is_checkpoint_wanted = is_inside_step = is_finished = should_stop = False
    # True inside a loop over `epochs`.
    is_in_epochs = False
    # True if the wanted checkpoint waits for a free staging slot instead of being skipped.
    waits_for_slot = False
    # True from the last batch of an epoch until its end is complete.
    is_at_end = False
    # The step whose end is complete, if the program reports ends by `finish_end`.
    _ended: int | None = None
    total: int | None = None
    epochs: int | None = None
    # The exception that ended training at a step boundary, as text. No step and no save may follow.
    failure = ""
    # True if the program has left the loop's generator by `break`, in the middle of a step.
    was_left = False
    _has_entered = _has_noted_end = _has_warned_of_gradients = False
    # The step whose save waits for the end of its epoch.
    _waits_for_end: int | None = None
    _knows_ends = True

    def __init__(
        self,
        context: RankContext,
        ranks: ControlGroup,
        record: RankRecord,
        recorder: Recorder,
        *,
        saver: Saver,
        guard: LossGuard,
        pace: Pace,
        position: Position,
        optimizers: OptimizerSteps,
        flags: SignalFlags | None,
    ) -> None:
        """`position` holds the number of complete steps. `flags` is None under an agent."""
        self._optimizers, self._flags = optimizers, flags
        self._context, self._ranks, self._record, self._recorder = context, ranks, record, recorder
        self._saver, self._guard, self._pace = saver, guard, pace
        self._position = position

    @property
    def completed(self) -> int:
        """The number of complete optimizer steps."""
        return self._position.completed

    @_part_of_training
    def enter(self) -> bool:
        """Process the boundary before this launch's first step. Return True to leave at once."""
        # The first step compiles and warms up, so it has its own limit of silence.
        self._look_at_signals(time.monotonic())
        if not self._has_entered and self._record.finish_step(self.completed, Phase.COMPILE):
            self._consider(self.completed)
        elif self._has_entered:
            # An earlier loop of this launch has ended.
            self._record.beat(Phase.TRAIN)
        self._has_entered = self._position.has_begun = True
        return self.should_stop

    def boundary(self, *, has_end: bool = False, ends_epoch: bool = False) -> bool:
        """Complete one more step. Return True if this rank must leave now.

        With `has_end`, the program still does work that belongs to this step, such as an
        evaluation, and then calls `finish_end`. A save that is due waits for that. A stop does not.
        With `ends_epoch`, it is the last step of an epoch of `epochs`, whose end follows.
        """
        # As `_part_of_training`, with fewer calls. Each takes a microsecond in a step, because the
        # program's code replaces this code in the processor's caches.
        if self.failure:
            self.require_training()
        try:
            step, pace, saver = self._position.finish_step(), self._pace, self._saver
            is_flushing, now = saver.is_flushing, time.monotonic()
            if saver.is_copying:
                saver.complete_copy(is_update=True)
            pace.meter.leave(now, is_flushing=is_flushing)
            if self._flags is not None and now >= self._flags.due_at:
                self._look_at_signals(now)
            if is_flushing:
                saver.collect()
            self._guard.look()
            self._optimizers.count_step()
            if self._position.resumed_inside:
                self._check_numbers()
            saver.notice()
            self.is_at_end = has_end or (ends_epoch and self.epochs is not None)
            is_due = self.is_checkpoint_wanted or step >= pace.cadence.next_step
            if is_due and not (has_end or self._must_wait_for_end(step)):
                self._meet(step, at=Boundary(step))
                pace.meter.enter(time.monotonic())
            elif pace.rhythm.is_due(step):
                saver.snapshot(step, at_once=self.is_at_end or pace.rhythm.every == 1)
                pace.meter.enter(time.monotonic())
            self._optimizers.has_stepped = False
            if self._record.finish_step(step):
                self._consider(step)
            return self.should_stop
        except SaveError:
            raise
        except BaseException as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            raise

    def require_training(self) -> None:
        """Raise `SessionError` if an exception has ended training at a step boundary."""
        if self.failure:
            raise SessionError(
                f"the training of this Session ended after step {self.completed} with "
                f"{self.failure}. No step and no checkpoint can follow. End the program, and the "
                "same command continues from the newest checkpoint; or call close() and create "
                "another Session"
            )

    def promise(self, *, steps: int | None = None, epochs: int | None = None) -> None:
        """Record how many steps or epochs the program will run.

        A program may loop again after a loop has ended. The end of the last one counts.
        """
        if self.should_stop:
            return
        if (steps, epochs) != (self.total, self.epochs) or self.is_finished:
            self.total, self.epochs = steps, epochs
            self.is_finished = self._has_noted_end = False
            self._recorder.event(
                EventKind.NOTE, text=f"the program loops over {self.promised}", promised=True
            )

    @property
    def promised(self) -> str:
        """The planned amount as text, such as "3 epochs", or "" if the program set none."""
        if self.epochs is not None:
            return f"{self.epochs} epochs"
        return f"{self.total} steps" if self.total is not None else ""

    def note_end(self, *, is_declared: bool = True) -> None:
        """Record once that the program ended by itself, and at which step.

        With `is_declared`, the program means this to be its end, also before its last step.
        """
        if self._has_noted_end:
            return
        self._has_noted_end = True
        of = f" of {self.promised}" if self.promised and not self.has_all_steps else ""
        self._recorder.event(
            EventKind.NOTE,
            text=f"left after step {self.completed}{of}",
            has_left=True,
            is_whole=self.has_all_steps if self.promised else None,
            is_declared=is_declared,
        )

    def finish_epoch(self) -> bool:
        """Complete the end of an epoch. Return True if this rank must leave now."""
        if self.should_stop:
            return True
        self._position.finish_epoch()
        self.finish_end()
        return False

    @_part_of_training
    def finish_end(self) -> None:
        """Complete the work after the last step's boundary. A save that waited for it comes now."""
        step = self.completed
        self._saver.pass_epoch()
        self._waits_for_end, self.is_at_end, self._ended = None, False, step
        if self._is_save_due(step) and not self._saver.has_staged(step):
            self._saver.give_up_snapshot(step)
            self._meet(step, at=Boundary(step, is_end=True))
        self._record.finish_end(step)
        # The evaluation is not part of the next step's time.
        self._pace.meter.enter(time.monotonic())
        self._record.beat(Phase.TRAIN)

    @_part_of_training
    def finish(self, *, is_declared: bool = True) -> None:
        """Commit the last save of this launch, then record how the launch ended, see `note_end`."""
        self.is_finished = True
        self._guard.finish()
        if self._ended == self.completed:
            self._saver.give_up_snapshot(self.completed)
        if (
            not self._saver.has_staged(self.completed)
            and self._ranks.largest([self._guard.asked])[0]
        ):
            self._guard.resolve()
        self._saver.finish(step=self.completed)
        self.note_end(is_declared=is_declared)
        is_stopped = self.should_stop and not self.has_all_steps
        self._record.beat(Phase.STOP if is_stopped else Phase.DONE)
        if self.should_stop and not self._context.has_agent and self._ranks.rank == 0:
            self._context.run.stop_file.unlink(missing_ok=True)

    def leave_step(self, *, ends_epoch: bool = False) -> None:
        """Continue after a loop that the program left by `break`. All ranks call this together.

        The step is complete if an optimizer has stepped in it. Otherwise it begins again. Raises
        `SpecError` if that is not known.
        """
        if not self.is_inside_step or self.should_stop:
            return
        if self._optimizers.is_inside or not self.was_left:
            raise SpecError(
                f"step {self.completed + 1}: the loop over session.batches or session.steps was "
                "left in the middle of this step, so the step is not complete. Let the loop run "
                "to its end, or loop over the loader itself and call session.boundary() after "
                "each step"
            )
        self.is_inside_step = False
        if self._optimizers.is_trained:
            self.boundary(ends_epoch=ends_epoch)

    def can_finish(self, *, is_handling: bool) -> bool:
        """Return True if the state may be saved, after any loop. All ranks call this together.

        A step that the program left by `break` counts if an optimizer has stepped in it. Nothing
        may be saved if an exception passes from inside a step, which `is_handling` says, or if
        ranks left after different steps.
        """
        if self.should_stop or self.failure:
            return False
        if not self.is_inside_step:
            return True
        if self._optimizers.is_inside or is_handling:
            return False
        if self._optimizers.is_trained:
            self._record.finish_step(self._position.finish_step())
        self.is_inside_step = False
        newest, oldest = self._ranks.largest([self.completed, -self.completed])
        if newest != -oldest:
            text = f"the ranks left their loop after different steps, {-oldest} to {newest}"
            self._recorder.event(EventKind.NOTE, text=f"{text}: no last checkpoint")
        return newest == -oldest

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a slow phase by its public name. Raises `SpecError` for any other name."""
        if not isinstance(name, str) or name not in SLOW_PHASES:
            raise SpecError(f"phase name={name!r}: expected one of {sorted(SLOW_PHASES)}")
        before = self._record.phase
        # An evaluation may exchange the weights, for example with an average of them.
        self._saver.complete_copy()
        self._record.beat(SLOW_PHASES[name])
        try:
            yield
        finally:
            self._record.beat(before)

    @property
    def step_under_way(self) -> int:
        """The step that metrics belong to. At an epoch's end, this is the epoch's last step."""
        return self.completed + (not (self.is_at_end or self._position.is_at_end_of_epoch))

    @property
    def has_all_steps(self) -> bool:
        """True if the program ran all the steps or epochs that it planned."""
        if self.epochs is not None:
            return (self._position.open_epoch or 0) >= self.epochs
        return self.total is not None and self.completed >= self.total and not self.is_at_end

    def warn_of_draws(self, generators: Sequence[str]) -> None:
        """Report which generators were used before the first step, if any."""
        if generators:
            self._recorder.note(f"random numbers ({', '.join(generators)}) {DRAWN}")

    def _check_numbers(self) -> None:
        """After the first step of a resume inside an epoch, look for numbers that began at 0."""
        position = self._position
        before = position.resumed_inside * position.batches_per_step
        position.resumed_inside = 0
        if has_restarted(before, position.batches_per_step):
            self._recorder.note(RESTARTED.format(before=before))

    def _warn_of_gradients(self, step: int) -> None:
        """Report once a checkpoint between two optimizer steps, whose gradients are not saved."""
        if self._has_warned_of_gradients or not self._optimizers.only_accumulates:
            return
        self._has_warned_of_gradients = True
        text = (
            f"no optimizer stepped in step {step}, and its checkpoint does not contain the "
            "gradients. If the program accumulates them over several batches, a resume from here "
            "loses some. Make these batches one step: pass the loader's batch_size to "
            "session.distributed_sampler, or call session.boundary() after each optimizer step"
        )
        self._recorder.note(text)

    def _is_save_due(self, step: int) -> bool:
        return self.is_checkpoint_wanted or self._pace.cadence.is_due(step)

    def _must_wait_for_end(self, step: int) -> bool:
        """Return True if a due save must wait for the end of the current epoch.

        If the program's epochs differ from those of its data, the next step shows it. Saves then
        no longer wait.
        """
        if self._waits_for_end is not None:
            self._knows_ends = False
        is_at_end = self._knows_ends and (self.is_at_end or self._position.is_at_end_of_epoch)
        self._waits_for_end = step if is_at_end else None
        return is_at_end

    def _consider(self, step: int) -> None:
        proposal = consider(self._context.status_table, self._record, step)
        if proposal is Proposal.GO:
            self.should_stop = True
            self.finish()
        elif proposal is Proposal.SAVE and not self._saver.has_staged(step):
            self._meet(step, asked=NOTICE)
            self._pace.meter.enter(time.monotonic())
            # End the save phase here: `finish_step` ran before the save.
            self._record.beat(Phase.TRAIN)
        elif proposal is Proposal.TEST:
            self._test(step)
            # The test is not part of the next step's time.
            self._pace.meter.enter(time.monotonic())
            self._record.beat(Phase.TRAIN)

    def _test(self, step: int) -> None:
        """Measure all nodes and their links together, and journal the results."""
        # A copy in the background would share the device and the memory.
        self._saver.complete_copy()
        identity, began = self._context.identity, time.monotonic()
        found = measure(
            self._ranks.group,
            node=identity.node,
            nodes=identity.nodes,
            is_first=identity.local_rank == 0,
            device=devices.in_use(),
        )
        if found is not None:
            facts: dict[str, Any] = {"took_s": round(time.monotonic() - began, 3)}
            facts |= found.to_json()
            self._recorder.event(EventKind.SLOWDOWN_TESTED, step=step, **facts)

    def _look_at_signals(self, now: float) -> None:
        for text in self._flags.look(now) if self._flags is not None else ():
            self._recorder.note(text)

    def _meet(self, step: int, *, asked: str = "", at: Boundary | None = None) -> None:
        """Meet all ranks at an agreed step, to decide on a save and on the next meeting step.

        `asked` is the reason of a save that was requested from all ranks. `at` is the place of a
        meeting that ranks may miss by mistake.
        """
        if self.is_checkpoint_wanted:
            asked, self.is_checkpoint_wanted = "request", False
        wanted = bool(asked)
        waits, self.waits_for_slot = self.waits_for_slot, False
        cadence, saver = self._pace.cadence, self._saver
        if not saver.is_planned:
            # The first step created the optimizer's state, whose size sets the cost of a copy.
            saver.prepare()
        decision = (0, 0)
        if self._ranks.rank == 0:
            # A checkpoint requested between two agreed steps does not move the next agreed step.
            is_due = cadence.is_due(step)
            now = time.monotonic()
            decision = cadence.decide(step, now) if is_due else (int(wanted), cadence.next_step)
        mine = [
            decision[0] or int(wanted),
            decision[1],
            saver.is_busy,
            saver.look(),
            self._guard.asked,
        ]
        asks = [saver.wants_plan, saver.wants_save]
        agreed = self._ranks.largest([*mine, *asks, *self._pace.figures()], at)
        save, next_step, is_busy, plan_status, bad_step, is_outdated, is_spoiled, *figures = agreed
        waits = waits or save == MUST_SAVE
        if is_spoiled and not bad_step:
            self._record.ask(0)
            # In place of the checkpoint whose image one rank has thrown away.
            save, waits, asked = 1, True, asked if asked != NOTICE else ""
        if bad_step:
            self._guard.resolve()
            # This meeting was called because of the loss. A cloud's notice is followed by a stop.
            save = save if asked != NOTICE else 0
        elif is_outdated:
            # This one was called because snapshots need a new plan.
            save = save if asked != NOTICE else 0
            self._record.ask(0)
            saver.plan_again()
            plan_status = saver.look()
        saved = bool(save) and (waits or not is_busy)
        if saved:
            saver.make_fit(plan_status)
            self._warn_of_gradients(step)
            saver.save(step=step, reason=asked or "interval")
        else:
            saver.complete_plan(plan_status)
            if save:
                saver.note_skipped(step)
        if not saved and (is_outdated or self._pace.rhythm.is_due(step)):
            saver.snapshot(step, at_once=True)
        saver.forget()
        self._pace.update(*figures, saved=saved)
        cadence.update(step, next_step, saved=saved, now=time.monotonic())
