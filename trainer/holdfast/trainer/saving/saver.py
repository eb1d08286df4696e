"""A session's saves: staged at a step boundary, polled at later ones, and journaled."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from torch.compiler import is_dynamo_compiling
from torch.distributed.checkpoint.planner import SavePlanner
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import checkpoint_id
from holdfast.contracts.environment import flush_timeout_s
from holdfast.contracts.errors import DamagedCheckpointError, SaveError
from holdfast.contracts.node.rank_status import NOWHERE, Phase, RankRecord
from holdfast.contracts.node.reporting import report
from holdfast.trainer.metrics import Recorder, that_fit
from holdfast.trainer.planning.rank_rows import describe_rank
from holdfast.trainer.planning.ranks import raise_problems
from holdfast.trainer.process.collector import pause_collection
from holdfast.trainer.ranks import forks
from holdfast.trainer.ranks.collective import ControlGroup, attempt, problem_of
from holdfast.trainer.ranks.rank_context import RankContext
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.saving.late import AT_ONCE, TRIED, Overlap
from holdfast.trainer.slots.modes import KEY as STAGING_KEY
from holdfast.trainer.slots.modes import MEMORY, Staging
from holdfast.trainer.slots.slots import SLOTS_PER_RANK
from holdfast.trainer.staging.in_flight import SaveResult
from holdfast.trainer.staging.program_files import ProgramFiles
from holdfast.trainer.staging.snapshots import first_copy_s
from holdfast.trainer.state.run_state import State

BEAT_S: Final = 1.0
# The longest delay until a slot that came free is seen.
SLOT_WAIT_S: Final = 0.05
# A shorter wait for the only slot is not logged. It counts as blocked time all the same.
WAIT_NOTED_S: Final = 0.1

# The weight of the newest copy in the moving average of a copy's cost.
COPY_WEIGHT: Final = 0.3
CRASH: Final = "crash"

Captured = tuple[State, dict[str, Any]]


def _note_nothing(_: ControlGroup) -> None:
    """Record nothing about a new plan: the default of `Saver`."""


def _check_nothing(_: State) -> None:
    """Accept every state: the default of `Saver`."""


def _nothing_steady(_: object) -> frozenset[int]:
    """Return that every tensor may change before an optimizer's step: the default of `Saver`."""
    return frozenset()


def _notice_nothing() -> None:
    """Find nothing at a step boundary: the default of `Saver`."""


class PlanStatus(IntEnum):
    """Whether a rank's plan fits its state. The largest value over all ranks counts.

    AWAITED: it fits, and `.metadata` is still being made in the background.
    """

    FITS = 0
    AWAITED = 1
    CHANGED = 2


class Saver:
    """Uses the checkpoint engine of one rank and keeps track of its saves in flight.

    `capture` returns the live state at a boundary. `steady` returns the addresses of those of its
    tensors that only the step of an optimizer changes: with `overlaps`, their copies may continue.
    It gets the facts that the engine has about that state, or None. All ranks call `note_forms`
    when they make a new plan. `check` raises `SaveError` if the same command could not load a
    state. `notice` does so at each boundary for what costs little to see. The saver measures the
    cost of saves: `copy_s`, the seconds for which a copy blocks training, and on rank 0 `flush_s`,
    the seconds from sealed to durable in the newest manifest.
    """

    # A subclass may save another kind of state.
    engine_class: type[CheckpointEngine] = CheckpointEngine

    def __init__(
        self,
        context: RankContext,
        ranks: ControlGroup,
        record: RankRecord,
        recorder: Recorder,
        *,
        capture: Callable[[], Captured],
        note_forms: Callable[[ControlGroup], None] = _note_nothing,
        check: Callable[[State], None] = _check_nothing,
        notice: Callable[[], None] = _notice_nothing,
        steady: Callable[[object], Collection[int]] = _nothing_steady,
        planner: SavePlanner | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._context, self._record, self._recorder = context, record, recorder
        self._ranks, self._capture, self._note_forms = ranks, capture, note_forms
        self._check, self.notice, self._steady = check, notice, steady
        # True while copies may continue after a save, once the trial has shown that the program
        # does not change tensors meanwhile. If it does later, all ranks save again.
        self.overlaps = self.wants_save = self._is_tried = False
        # True from a copy that continues, or from the trial, until `complete_copy`. Each step reads
        # it.
        self.is_copying = False
        # The facts of that save's journal line, and the step of the last copy that went on.
        self._unsealed: dict[str, Any] = {}
        self._late_step = NOWHERE
        # True from a save until `collect` or `wait` finds no more in flight. Each step reads it.
        self.is_flushing = False
        self.is_planned = self.has_saved = False
        self._has_planner = planner is not None
        self._flush_timeout_s = flush_timeout_s()
        self.engine = self.engine_class(
            flusher=context.flusher,
            run=context.run,
            identity=context.identity,
            group=ranks.group,
            stage_group=ranks.stage_group,
            planner=planner,
            staging=staging,
        )
        # The time for which the last save waited for the only slot.
        self._staging, self._waited_s = staging or MEMORY, 0.0
        # Files that the program's framework writes beside the checkpoints.
        self.files = ProgramFiles(
            self.engine.connection,
            beat=lambda: record.beat(Phase.SAVE),
            timeout_s=self._flush_timeout_s,
        )
        self._failed: dict[int, str] = {}
        self._staged_step = 0
        self._staged_name: str | None = None
        self._parent: str | None = None
        # The newest step that this rank knows to be committed.
        self.committed_step = 0
        self._captured: Captured | None = None
        self._capture_s = 0.0
        self._copy_s: float | None = None
        self.flush_s: float | None = None
        self._has_warned = self._has_warned_of_metrics = False
        # True from a snapshot that did not fit the plan until the ranks plan again.
        self.wants_plan = False
        # Plans that snapshots asked for, and snapshots missed since the last one.
        self._plans = self._missed = 0

    def has_staged(self, step: int) -> bool:
        """True if `step` was the last to be staged or was restored, and needs no save."""
        return step == self._staged_step

    @property
    def staged_name(self) -> str | None:
        """The directory name of the checkpoint that was staged last in this launch, or None."""
        return self._staged_name

    def pass_epoch(self) -> None:
        """Record that the state differs from the restored one although no step is complete.

        A step that was staged here keeps the state from before the epoch's end, because its
        name is taken.
        """
        if self._staged_name is None:
            self._staged_step = NOWHERE

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps that are staged and whose results were not processed yet."""
        return self.engine.in_flight

    @property
    def is_full(self) -> bool:
        """True while every slot of this rank is still being written."""
        return len(self.in_flight) >= self._staging.slots

    @property
    def is_busy(self) -> bool:
        """True while a save that is due would be skipped. With one slot it waits instead."""
        return self._staging.slots > 1 and self.is_full

    @property
    def copy_s(self) -> float:
        """The cost of a copy in seconds, estimated from its size before the first copy."""
        if self._copy_s is None:
            return first_copy_s(self.engine.tensor_bytes)
        return self._copy_s

    def began_at(self, step: int, checkpoint: str | None, manifest: Manifest | None) -> None:
        """Record the restored `step`, which needs no save, and the first parent's id."""
        self._staged_step, self._parent = step, checkpoint
        self.committed_step = step if checkpoint is not None else 0
        is_ours = manifest is not None and manifest.run_uid == self._context.identity.run_uid
        if manifest is not None and is_ours:
            # Later checkpoints record what was logged before the resume too.
            self._recorder.latest.update(manifest.metrics)
            self._recorder.watch.meet(manifest.metrics)
        if manifest is not None and is_ours and manifest.reason == CRASH:
            text = (
                f"step {step} was only in memory when the ranks died, and was then committed "
                f"({manifest.bytes} bytes)"
            )
            self._recorder.event(EventKind.NOTE, text=text, checkpoint=manifest.name, step=step)

    def prepare(self) -> None:
        """Plan for the current state. All ranks call this together. Raises `SaveError`."""
        self._record.beat(Phase.SAVE)
        # Saves of the old plan end first. Slow storage is not a hang, so say that the rank lives.
        self.wait()
        state = self._take_captured()[0]
        self._require_loadable(state)
        self.engine.prepare(state, timeout_s=self._flush_timeout_s)
        self._note_forms(self._ranks)
        self.is_planned = True

    def begin(self, *, awaits_state: bool) -> None:
        """Prepare saves before the first step. All ranks call this together. Raises `SaveError`.

        If a new run's first step will create optimizer state, the plan is made after that step.
        Here the ranks only check that the current state can be saved.
        """
        if not awaits_state or self._parent is not None:
            self.prepare()
            return
        state = self._take_captured()[0]
        self._require_on_all(self._staging.find_directory)
        self._require_loadable(state)
        if not self._has_planner:
            self._require_on_all(lambda: describe_rank(state))

    def _require_loadable(self, state: State) -> None:
        """Raise `SaveError` on all ranks if the same command could not load `state` on one."""
        self._require_on_all(lambda: self._check(state))

    def _require_on_all(self, act: Callable[[], object]) -> None:
        _, error = attempt(act)
        problems = self._ranks.gather(lambda: problem_of(error, self._ranks.rank))
        raise_problems([problem for problem in problems if problem])

    def complete_plan(self, found: int) -> None:
        """At a meeting before the first save, plan for state that was created since.

        All ranks call this with the largest status of `look`. Raises `SaveError`.
        """
        if found == PlanStatus.CHANGED and not self.has_saved:
            self.prepare()

    @pause_collection()
    def look(self) -> PlanStatus:
        """Capture the state for this boundary and return whether the plan fits it."""
        self._captured = None
        self._captured = self._take_captured()
        if self.engine.changes(self._captured[0]) is not None:
            return PlanStatus.CHANGED
        return PlanStatus.AWAITED if self.engine.awaits_metadata else PlanStatus.FITS

    def make_fit(self, found: int) -> None:
        """Before a save, plan again if needed. All ranks call it with the largest `look` status.

        Raises `SaveError` on all ranks if no plan can be made.
        """
        if found == PlanStatus.AWAITED:
            self._record.beat(Phase.SAVE)
            problem = self.engine.wait_for_metadata()
            found = self._ranks.largest([PlanStatus.CHANGED if problem else PlanStatus.FITS])[0]
        if found == PlanStatus.CHANGED:
            self.prepare()

    def forget(self) -> None:
        """Drop the state that `look` captured."""
        self._captured = None

    def save(self, *, step: int, reason: str, at_once: bool = False) -> None:
        """Stage the state as the checkpoint of `step`. Return as soon as it is sealed.

        Unless `at_once`, a thread may still copy tensors that only an optimizer's step changes. It
        is then sealed by `complete_copy`. Raises `SaveError` if it cannot be staged.
        """
        self._record.beat(Phase.SAVE)
        self.complete_copy()
        state, document = self._take_captured()
        began = time.monotonic()
        self._await_slot(began + self._flush_timeout_s)
        self._waited_s = self._note_wait(step, time.monotonic() - began)
        self.is_flushing, self.wants_save = True, False
        name = self.engine.save(
            state,
            document,
            step=step,
            reason=reason,
            parent=self._parent,
            metrics=self._metrics(),
            timeout_s=self._flush_timeout_s,
            continuing=self._overlap(state, at_once=at_once),
            waited_s=self._waited_s,
        )
        held_s = time.monotonic() - began
        self._staged_step, self._staged_name = step, name
        self.has_saved = True
        facts = {"checkpoint": name, "step": step, "bytes": self.engine.tensor_bytes}
        if not self._continues(step, facts | {"reason": reason}):
            self._note_staged(held_s, facts | {"reason": reason})

    def _note_wait(self, step: int, waited_s: float) -> float:
        """Return the time for which a save has waited for the only slot, and log it."""
        if self._staging.slots > 1:
            return 0.0
        if waited_s > WAIT_NOTED_S:
            text = (
                f"step {step}: the save waited {waited_s:.1f} s until the former checkpoint was "
                f"written, because {STAGING_KEY} is {self._staging.mode!r}"
            )
            self._recorder.event(EventKind.NOTE, text=text)
        return waited_s

    def _overlap(self, state: State, *, at_once: bool) -> Overlap:
        """Return which copies may continue. The first one in a launch is the trial."""
        if at_once or not self.overlaps:
            return AT_ONCE
        facts = self.engine.facts_of(state)
        return Overlap(self._steady(facts), is_trial=not self._is_tried)

    def _continues(self, step: int, facts: dict[str, Any]) -> bool:
        """Return True if the copy of `step` continues. `facts` are those of its journal line."""
        is_late = self.engine.is_copying
        self.is_copying = is_late or self.engine.is_on_trial
        if is_late:
            self._late_step, self._unsealed = step, facts
        return is_late

    def _note_staged(self, blocked_s: float, facts: Mapping[str, Any]) -> None:
        # A snapshot never waits, so its rhythm follows the copy alone.
        self._measure(blocked_s - self._waited_s)
        self._recorder.event(EventKind.STAGED, blocked_s=round(blocked_s, 6), **facts)

    def complete_copy(self, *, is_update: bool = False) -> None:
        """Complete a copy that continues, and seal it. Then the tensors of the state may change.

        If they have changed meanwhile, the image is thrown away, and later saves copy at once. Set
        `is_update` before an optimizer steps, before an update by hand and at the end of a step.
        Only there a trial is over. Elsewhere, such as before an evaluation, it has seen too little
        of the step, so the next copy is the trial.
        """
        if not self.is_copying:
            return
        done = self.engine.complete_copy()
        is_steady = self.engine.end_trial(is_over=is_update)
        # Only now: another thread that steps an optimizer waits above until then.
        self.is_copying = False
        if is_steady is not None:
            self._is_tried = True
            if not is_steady:
                self._copy_at_once(TRIED)
        if done is None:
            return
        facts, self._unsealed = self._unsealed, {}
        if done.is_spoiled:
            self._copy_at_once(f"{done.problem}. This image was thrown away")
            if not done.is_snapshot:
                # All ranks save again at one step, because this one fails on all of them.
                self.wants_save = True
                self._record.ask(done.name.step)
        if done.problem:
            return
        if done.is_snapshot:
            self._measure(done.blocked_s)
        else:
            self._note_staged(done.blocked_s, facts)

    def _copy_at_once(self, why: str) -> None:
        """End copies that continue, because the program changes tensors meanwhile."""
        self.overlaps = False
        text = (
            f"{why}. From now on each copy is complete before training continues. Call "
            "session.before_update() before such a change, and saves hold nothing up"
        )
        report(f"holdfast: {text}")
        self._recorder.event(EventKind.NOTE, text=text)

    def snapshot(self, step: int, *, at_once: bool = False) -> None:
        """Keep the state after `step` in memory if a slot is free. This never fails training.

        With `at_once`, the copy is complete on return. So it is with a single slot: until the copy
        is complete, there is no snapshot. After a step whose copy went on, there is no
        snapshot: another rank may not have sealed that one yet, and the older snapshot, which this
        one would overwrite, is then the newest that all ranks have.
        """
        self.complete_copy()
        if step == self._late_step + 1:
            return
        state, document = self._take_captured()
        began = time.monotonic()
        try:
            is_kept = self.engine.snapshot(
                state,
                document,
                step=step,
                reason=CRASH,
                parent=self._parent,
                metrics=self._metrics(),
                continuing=self._overlap(state, at_once=at_once or self._staging.slots == 1),
            )
        except SaveError as error:
            self._note_no_snapshot(step, error)
            return
        self._missed = 0
        if is_kept and not self._continues(step, {}):
            self._measure(time.monotonic() - began)

    def plan_again(self) -> None:
        """Plan for a state that has changed. All ranks call this together. Raises `SaveError`."""
        self.wants_plan = False
        self._plans += 1
        self.prepare()

    def _note_no_snapshot(self, step: int, error: SaveError) -> None:
        """Ask all ranks to plan again, because the state no longer fits the plan.

        Each new plan waits for saves in flight. So a state that changes again and again, as while
        experts are used for the first time, is planned after more and more missed snapshots. Every
        checkpoint plans for it too.
        """
        if not self._has_warned:
            text = f"no snapshot of step {step}, the ranks plan again: {error}"
            self._recorder.event(EventKind.NOTE, text=text)
        self._has_warned, self._missed = True, self._missed + 1
        if self._missed >= 1 << self._plans:
            self.wants_plan = True
            self._record.ask(step)

    def _metrics(self) -> dict[str, float]:
        """Return the latest metrics, as many as a checkpoint can record."""
        self._recorder.watch.look_back()
        kept, left_out = that_fit(self._recorder.latest)
        if left_out and not self._has_warned_of_metrics:
            self._has_warned_of_metrics = True
            self._recorder.note(
                f"checkpoints record {len(kept)} of {len(self._recorder.latest)} metrics, those "
                f"with the shortest names. Left out: {left_out[0]} and {len(left_out) - 1} more. "
                "The metrics file has all of them"
            )
        return kept

    def _take_captured(self) -> Captured:
        """Return the state that `look` captured, once, or capture it now."""
        captured, self._captured = self._captured, None
        if captured is None:
            began = time.monotonic()
            captured = self._capture()
            self._capture_s = time.monotonic() - began
        return captured

    def _measure(self, copied_s: float) -> None:
        cost_s = self._capture_s + copied_s
        former_s = cost_s if self._copy_s is None else self._copy_s
        self._copy_s = former_s + COPY_WEIGHT * (cost_s - former_s)

    def note_skipped(self, step: int) -> None:
        """Log that a checkpoint was due while both staging slots were still being written."""
        text = f"step {step}: no checkpoint, the last {SLOTS_PER_RANK} are still being written"
        self._recorder.event(EventKind.NOTE, text=text)

    def collect(self) -> None:
        """Process the results of saves since the last call. This reads shared memory only."""
        for result in self.engine.poll():
            self._take(result)
        self.is_flushing = bool(self.in_flight)

    def wait(self) -> None:
        """Wait until no save is in flight, for the spec's `flush_timeout_s` at most."""
        give_up = time.monotonic() + self._flush_timeout_s
        self.complete_copy()
        self.collect()
        while self.in_flight and time.monotonic() < give_up:
            self._record.beat(Phase.SAVE)
            for result in self.engine.wait(BEAT_S):
                self._take(result)
        self.is_flushing = bool(self.in_flight)

    def quiesce(self) -> None:
        """Wait for saves in flight, and discard snapshots."""
        self.wait()
        self.engine.discard_snapshots()

    def give_up_snapshot(self, step: int) -> None:
        """Discard a snapshot of `step`, whose save will contain another state under that name.

        Ranks then meet before any of them saves, so that no crash can commit a mix of both.
        """
        self.complete_copy()
        self.engine.discard_snapshots(step)

    def _await_slot(self, give_up: float) -> None:
        """Report that this rank is alive while all slots are busy, until `give_up`."""
        while self.is_full and time.monotonic() < give_up:
            self._record.beat(Phase.SAVE)
            for result in self.engine.wait(SLOT_WAIT_S):
                self._take(result)

    def finish(self, *, step: int) -> None:
        """Commit `step` unless it is already committed or was just restored.

        Raises `SaveError` if the checkpoint of `step` did not become durable.
        """
        self.complete_copy()
        if step != self._staged_step:
            self.collect()
            # All ranks are here. This is the only collective of a last save.
            self.make_fit(self._ranks.largest([self.look()])[0])
            self.save(step=step, reason="final", at_once=True)
        self.wait()
        if problem := self._why_uncommitted(step):
            raise SaveError(
                f"the last checkpoint, of step {step}, was not committed: {problem}. The newest "
                f"committed one is {self._parent or 'none'}; free space or fix the storage, then "
                "run the same command"
            )

    def _why_uncommitted(self, step: int) -> str | None:
        if step in self.in_flight:
            return f"still being written after {self._flush_timeout_s:.0f} s"
        return self._failed.get(step) or self._missing_manifest()

    def _missing_manifest(self) -> str | None:
        """Return why the last staged step is not committed, although the flusher reported it.

        Only rank 0 checks, because its node's flusher writes the manifest.
        """
        name = self._staged_name
        if name is None or self._context.identity.rank != 0:
            return None
        path = self._context.run.checkpoint(name)
        try:
            is_there = read_manifest(path) is not None
        except (OSError, DamagedCheckpointError) as error:
            return f"the flusher reported {name} as written, but its manifest: {error}"
        return None if is_there else f"the flusher reported {name} as written, without a manifest"

    def close(self, *, is_orderly: bool) -> None:
        """Release the engine. The flusher finishes the sealed steps.

        It also commits snapshots, unless the end is orderly. An orderly end discards them.
        """
        self.complete_copy()
        if is_orderly:
            self.engine.discard_snapshots()
            self.engine.connection.leave()
        self.files.close()
        self.engine.close()

    def _take(self, result: SaveResult) -> None:
        facts: dict[str, Any] = {"checkpoint": result.checkpoint, "step": result.step}
        if not result.committed:
            problem = result.error or "the flusher gave no reason"
            self._failed[result.step] = problem
            self._recorder.event(EventKind.SAVE_FAILED, **facts, error=problem)
            if self._ranks.rank == 0:
                report(f"holdfast: {result.checkpoint} was not saved: {problem}")
            return
        self._parent = checkpoint_id(self._context.run.name, result.checkpoint)
        self.committed_step = max(self.committed_step, result.step)
        directory = self._context.run.checkpoint(result.checkpoint)
        self._recorder.event(EventKind.COMMITTED, lambda: self._measured(directory), **facts)

    def _measured(self, directory: Path) -> dict[str, Any]:
        """Return the manifest's facts of a committed save, or {} if it has been deleted.

        The recorder's thread calls this. The time at which training sees a commit does not show
        how long the flush took, because an evaluation may lie between them.
        """
        manifest = read_manifest(directory)
        if manifest is None:
            return {}
        self.flush_s = manifest.flush_s
        return {"bytes": manifest.bytes, "flush_s": manifest.flush_s}


class UpdateHook:
    """Completes the copies of a saver before any optimizer of the process steps.

    `close` must be called. A step that torch compiles runs no such hook. The session then finds at
    the step boundary that the tensors have changed.
    """

    def __init__(self, saver: Saver) -> None:
        # Without a reference: torch keeps the hook, and the saver leads to the session.
        held, owner = weakref.ref(saver), forks.count

        def complete(*_: Any) -> None:
            if is_dynamo_compiling():
                return
            its = held()
            # A forked child has the copy, and not the thread that makes it.
            if its is not None and its.is_copying and forks.count == owner:
                its.complete_copy(is_update=True)

        self._handle = register_optimizer_step_pre_hook(complete)

    def close(self) -> None:
        """Stop hearing."""
        self._handle.remove()
