"""The checkpoint engine: a rank calls it to save and to poll the results of saves.

The ranks plan together once. After that, a save is a copy into memory and a seal, without
communication. The node's flusher does the rest while training continues.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.environment import FLUSH_TIMEOUT_DEFAULT_S as SAVE_TIMEOUT_S
from holdfast.contracts.errors import SaveError
from holdfast.contracts.spec.checkpoint import write_limit
from holdfast.trainer.placed import PlacedName, SavePlace
from holdfast.trainer.planning import custom, ranks
from holdfast.trainer.planning.layout import Layout, local_part
from holdfast.trainer.planning.signature import Columns, Flat, Joined, TensorFacts, flatten
from holdfast.trainer.process import devices
from holdfast.trainer.process.collector import pause_collection
from holdfast.trainer.ranks.collective import Group, HierarchicalGroup, problem_of, tree_over
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.ranks.topology import describe_mesh
from holdfast.trainer.saving.late import AT_ONCE, Completed, LateSave, Overlap
from holdfast.trainer.slots.modes import MEMORY, Staging
from holdfast.trainer.slots.slot_table import SlotTable
from holdfast.trainer.slots.slots import SlotState
from holdfast.trainer.staging.copying import LateCopy, Trial
from holdfast.trainer.staging.in_flight import InFlight, SaveResult
from holdfast.trainer.staging.stage import FlusherConnection, Stage, StagedSlot
from holdfast.trainer.staging.step_facts import StepFacts, make_table

ERROR_CHARACTERS_MAX: Final = 1000
# The reasons of saves that `checkpoint.write_limit` may slow: training continues meanwhile. After
# any other, such as the last save or one that a cloud's notice asks for, the time is short.
LIMITED_REASONS: Final = frozenset({"interval", "request"})


class CheckpointEngine:
    """One rank's saves.

    `flusher` is the address file of the node's flusher, called by `prepare`. `group` connects all
    ranks: a tree, a process group for CPU tensors, or None for a single process. `stage_group`
    connects the ranks of this pipeline stage, if `identity` has a stage. A custom `planner` makes
    all ranks plan every save. Without one, or with stock DCP's default planner, the plan is kept.
    Without a `run`, each save needs a place. With `any_bytes`, a planner may save any byte entries.
    """

    def __init__(
        self,
        *,
        flusher: str,
        run: RunPaths | None,
        identity: Identity,
        group: Group,
        stage_group: Group = None,
        planner: SavePlanner | None = None,
        any_bytes: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self._run, self._identity, self._group = run, identity, group
        tiers = Tiers.from_environment(os.environ)
        self._node_folder = tiers.node_folder(identity.run, identity.run_uid)
        self.connection = FlusherConnection(flusher, identity, staging or MEMORY)
        self._stage_group = group if identity.stage is None else stage_group
        self._planner: SavePlanner | None = None
        self._any_bytes = any_bytes
        self._is_limited = write_limit() is not None
        self.plan_with(planner)
        self._layout: Layout | None = None
        self._stage: Stage | None = None
        self._saves = InFlight()
        # The save whose copy continues while training continues. The hook of an optimizer may
        # complete it in a thread of autograd.
        self._late: LateSave | None = None
        self._completing = threading.RLock()
        self._trial: Trial | None = None
        self._held = contextlib.ExitStack()
        self._mesh: dict[str, int] = {}
        self._tensor_bytes = 0
        self._compared: tuple[dict[str, Any], Mapping[str, Any]] | None = None
        self._joined = Joined()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensors that this rank writes at each save, or 0 before the first plan."""
        return self._tensor_bytes

    def plan_with(self, planner: SavePlanner | None) -> None:
        """Plan later saves with another planner. All ranks must do so at the same save."""
        self._planner = None if type(planner) is DefaultSavePlanner else planner

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps that are staged and whose results `poll` has not returned yet."""
        return self._saves.steps

    @property
    def is_copying(self) -> bool:
        """True from a save whose copy continues in a thread until `complete_copy`."""
        return self._late is not None

    def complete_copy(self) -> Completed | None:
        """Complete the copy of a save that continues in a thread, then seal it. None without one.

        Call it before anything changes the tensors that the thread copies.
        """
        with self._completing:
            late = self._late
            done = None if late is None else late.complete()
            self._late = None
        if done is not None and not done.is_snapshot:
            self.connection.notify("sealed", step=done.name.step)
        return done

    @property
    def is_on_trial(self) -> bool:
        """True from a copy that is a trial until `end_trial`."""
        return self._trial is not None

    def end_trial(self, *, is_over: bool = True) -> bool | None:
        """Return whether tensors are as the last copy that was a trial found them, None without.

        Without `is_over`, drop the trial: the program has not had a step to change them in.
        """
        with self._completing:
            trial, self._trial = self._trial, None
            return trial.finish() if trial is not None and is_over else None

    def prepare(self, state: dict[str, Any], *, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Plan for states like `state` and allocate the slots, so that the next save is ordinary.

        All ranks call this together: before the first save, and again when any rank's state has
        changed. It waits at most `timeout_s` seconds for saves of the previous plan. Raises
        `SaveError` on all ranks if one cannot save its state or allocate its slots.
        """
        if self._planner is not None:
            self._build_custom(self._planner, state, timeout_s)
        else:
            self._build(state, timeout_s)

    def changes(self, state: dict[str, Any]) -> str | None:
        """Return what no longer fits the plan, as text, or None if a save needs no new plan.

        The text may also be why `.metadata` could not be made. The next `prepare` then raises that
        on all ranks. A save of the same `state` right after this call does not compare again.
        Raises `SaveError` if the state cannot be saved at all.
        """
        if self._planner is not None:
            return None
        if self._layout is None:
            return "nothing is planned yet"
        flat = flatten(state, self._joined)
        found = self._layout.signature.find_changes(flat)
        if found is None and self._stage is not None:
            found = self._stage.problem
        self._compared = None if found else (state, flat)
        return found

    def facts_of(self, state: dict[str, Any]) -> TensorFacts | None:
        """Return what `changes` has found of the tensors of `state`, None if that is not known.

        It is the same object for states whose tensors have the same names, forms and memory.
        """
        compared = self._compared
        if compared is None or compared[0] is not state or not isinstance(compared[1], Flat):
            return None
        return compared[1].facts

    @property
    def awaits_metadata(self) -> bool:
        """True while `.metadata` is made in the background. A save waits for it before sealing."""
        return self._stage is not None and not self._stage.is_late_done

    def wait_for_metadata(self) -> str | None:
        """Wait until `.metadata` is in the slots. Return the reason, as text, if it failed."""
        return None if self._stage is None else self._stage.wait_for_metadata()

    def save(
        self,
        state: dict[str, Any],
        train_state: Mapping[str, Any] | None,
        *,
        step: int,
        reason: str,
        parent: str | None,
        metrics: Mapping[str, float] | None = None,
        timeout_s: float = SAVE_TIMEOUT_S,
        place: SavePlace | None = None,
        continuing: Overlap = AT_ONCE,
        waited_s: float = 0.0,
    ) -> str:
        """Stage `state` as the checkpoint of `step` and return its directory name.

        All ranks call this after the same step. When it returns, the state may change, except
        tensors that `continuing` names. They may change after `complete_copy`. `poll` reports when
        the step is committed. `train_state` is JSON that rank 0 writes. While all slots are being
        written, the call waits. `waited_s` is how long the caller has waited for one. A first save
        without `prepare` plans with all ranks, and so does every save with a custom planner. With
        a `place`, the checkpoint goes into that directory and not to the run, and a failed copy
        fails the step on all ranks. Raises `SaveError` if the state cannot be saved, differs from
        the plan or does not fit into memory, or if no slot is free within `timeout_s` seconds.
        """
        began = time.monotonic() - waited_s
        self.complete_copy()
        stage, flat = self._planned(state, timeout_s)
        facts = self._facts(step, reason, parent, metrics, train_state, place)
        document = facts.encode_train_state() if self._identity.rank == 0 else None
        if reason not in LIMITED_REASONS or stage.free() is None:
            self._hurry(step)
        staged = self._take_slot(stage, step, timeout_s)
        if staged is None:
            raise SaveError(
                f"step {step}: no staging slot came free within {timeout_s:.0f} s. Steps "
                f"{self._saves.update()} are still being written; the storage may be hanging"
            )
        is_late = self._planner is None and place is None
        self._fill(
            staged, flat, document, facts, began, continuing=continuing if is_late else AT_ONCE
        )
        self._saves.add(staged, facts.name)
        if self._late is None:
            self.connection.notify("sealed", step=step)
        return str(facts.name)

    def snapshot(
        self,
        state: dict[str, Any],
        train_state: Mapping[str, Any],
        *,
        step: int,
        reason: str,
        parent: str | None,
        metrics: Mapping[str, float] | None = None,
        continuing: Overlap = AT_ONCE,
    ) -> bool:
        """Keep `state` in memory only. It is committed as `step` only if the ranks die.

        It overwrites the older snapshot, and never a slot that is being written. Returns False if
        no slot was free, so that the snapshot was skipped. Each rank decides this for itself. After
        a crash, the newest step that all ranks have is committed. Raises `SaveError` if the
        state cannot be saved or differs from the plan.
        """
        began = time.monotonic()
        self.complete_copy()
        if self._layout is None or self._stage is None or self._planner is not None:
            return False
        if self.awaits_metadata or self._stage.problem is not None:
            return False
        self.connection.keep_up()
        flat = self._checked(self._layout, state)
        facts = self._facts(step, reason, parent, metrics, train_state)
        document = facts.encode_train_state() if self._identity.rank == 0 else None
        staged = self._take_slot(self._stage, step, 0.0)
        if staged is None:
            return False
        self._fill(staged, flat, document, facts, began, continuing=continuing, is_snapshot=True)
        return True

    def discard_snapshots(self, step: int | None = None) -> None:
        """Discard all snapshots, or only the snapshot of `step`."""
        with self._completing:
            late = self._late
            if late is not None and late.is_snapshot and step in {None, late.name.step}:
                late.cancel()
                self._late = None
        for staged in self._stage.slots if self._stage else ():
            slot = staged.slot
            if slot.state is SlotState.SNAPSHOT and step in {None, slot.step}:
                slot.state = SlotState.EMPTY

    def poll(self) -> list[SaveResult]:
        """Return results since the last call, oldest first. This reads shared memory only."""
        return self._saves.take()

    def wait(self, timeout_s: float = SAVE_TIMEOUT_S) -> list[SaveResult]:
        """Wait until no save of this rank is in flight. Return results like `poll`.

        After `timeout_s` seconds it returns the results so far. `in_flight` then lists the rest.
        """
        self.complete_copy()
        self._wait_for_saves(timeout_s)
        return self.poll()

    def _wait_for_saves(self, timeout_s: float) -> list[int]:
        if self.in_flight:
            self._hurry(max(self.in_flight))
        return self._saves.wait(timeout_s)

    def _hurry(self, step: int) -> None:
        """Have the flusher write steps up to this one at full speed: training waits for one."""
        if self._is_limited:
            self.connection.notify("hurry", step=step)

    def close(self) -> None:
        """Release slots and flusher. Sealed steps are still committed."""
        self.complete_copy()
        if self._stage is not None:
            self._saves.close()
            self._trial = None
            self._stage.close()
            self._stage = self._layout = None
        self.connection.close()
        self._group = self._stage_group = None
        self.__dict__.pop("_trees", None)
        self._held.close()

    def _planned(self, state: dict[str, Any], timeout_s: float) -> tuple[Stage, Mapping[str, Any]]:
        """Return the plan's slots and the values to copy into them."""
        if self._planner is not None:
            values = self._build_custom(self._planner, state, timeout_s)
        else:
            if self._layout is None or self._stage is None:
                self._build(state, timeout_s)
            assert self._layout is not None
            values = self._checked(self._layout, state)
        assert self._stage is not None
        return self._stage, values

    def _build(self, state: dict[str, Any], timeout_s: float) -> None:
        """Plan with all ranks and open slots for the plan. All ranks succeed or all raise."""
        tree, stage_tree = self._trees
        layout = ranks.plan_together(
            state,
            identity=self._identity,
            tree=tree,
            stage_tree=stage_tree,
            prepare=lambda: self._release_old_stage(timeout_s),
        )
        self._open_stage(layout, flatten(state))

    def _build_custom(
        self, planner: SavePlanner, state: dict[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        """Plan one save with the custom planner. Open new slots only if the layout changed."""
        tree, stage_tree = self._trees
        # A planner may know no other mappings than dicts.
        state = {key: dict(its) if type(its) is Columns else its for key, its in state.items()}
        made = custom.plan_custom(
            planner,
            state,
            identity=self._identity,
            tree=tree,
            stage_tree=stage_tree,
            any_bytes=self._any_bytes,
        )
        if tree.agree(None if self._layout == made.layout else "another layout"):
            ranks.all_or_none(tree, self._identity.rank, lambda: self._release_old_stage(timeout_s))
            self._open_stage(made.layout, made.values)
        return made.values

    @functools.cached_property
    def _trees(self) -> tuple[HierarchicalGroup, HierarchicalGroup]:
        """The hierarchical groups of all ranks and of this pipeline stage's ranks."""
        whole = self._open_tree(self._group)
        is_whole = self._identity.stage is None
        return whole, whole if is_whole else self._open_tree(self._stage_group)

    def _open_tree(self, group: Group) -> HierarchicalGroup:
        tree = self._held.enter_context(tree_over(group))
        return self._held.enter_context(
            contextlib.closing(HierarchicalGroup(tree, self._identity.node))
        )

    def _open_stage(self, layout: Layout, values: Mapping[str, Any]) -> None:
        tree, _ = self._trees
        ranks.check_memory(tree, self._identity.node, layout.image_bytes, self.connection.staging)
        self._mesh = dict(self._identity.mesh) or describe_mesh(values)
        who = self._identity

        def open_it() -> Stage:
            device = devices.find(local_part(values[place.key]) for place in layout.tensors)
            return Stage(self.connection, layout, device=device)

        self._stage = ranks.all_or_none(tree, who.rank, open_it)
        if self._run is not None:
            self.connection.describe(layout, self._run.attempt(who.attempt).launch(who.launch))
        self._layout = layout
        self._tensor_bytes = sum(place.bytes for place in layout.tensors)

    def _release_old_stage(self, timeout_s: float) -> None:
        """Wait until the old plan's staged steps are written, then free its slots.

        Snapshots in them are given up. From here to the first save of the new plan, a crash falls
        back to the newest committed checkpoint.
        """
        if self._stage is None:
            return
        self.complete_copy()
        if writing := self._wait_for_saves(timeout_s):
            raise SaveError(
                f"steps {writing} were not written within {timeout_s:.0f} s, so the "
                "layout cannot be planned again; the storage may be hanging"
            )
        self.discard_snapshots()
        problem = self._stage.problem
        self._trial = None
        self._stage.close()
        self._stage = self._layout = None
        self.connection.release_slots()
        if problem is not None:
            raise SaveError(problem)

    # --- one save -------------------------------------------------------------------------

    def _checked(self, layout: Layout, state: dict[str, Any]) -> Mapping[str, Any]:
        """Return `state` flattened. Raises `SaveError` if it does not fit `layout`."""
        compared, self._compared = self._compared, None
        if compared is not None and compared[0] is state:
            return compared[1]
        flat = flatten(state, self._joined)
        layout.signature.check(flat)
        return flat

    def _facts(
        self,
        step: int,
        reason: str,
        parent: str | None,
        metrics: Mapping[str, float] | None,
        train_state: Mapping[str, Any] | None,
        place: SavePlace | None = None,
    ) -> StepFacts:
        own = CheckpointName(step, self._identity.attempt, self._identity.launch)
        return StepFacts(
            name=PlacedName(step, place.token) if place else own,
            reason=reason,
            parent=parent,
            metrics=metrics or {},
            train_state=train_state,
            place=place,
        )

    @pause_collection()
    def _fill(
        self,
        staged: StagedSlot,
        flat: Mapping[str, Any],
        document: bytes | None,
        facts: StepFacts,
        began: float,
        *,
        continuing: Overlap = AT_ONCE,
        is_snapshot: bool = False,
    ) -> None:
        """Copy all data into the slot and seal it. If the copy fails, the slot is free again.

        With a place, the slot is then sealed with the error, for the other ranks that wait. A copy
        of tensors in `continuing` may continue. The slot is then sealed by `complete_copy`.
        """
        assert self._layout is not None
        who = self._identity
        table = functools.partial(
            make_table,
            facts,
            who=who,
            run=self._run,
            node_folder=self._node_folder,
            train_state_bytes=None if document is None else len(document),
            manifest=facts.for_manifest(who, self._mesh) if who.rank == 0 else None,
        )
        try:
            layout, late = self._write(staged, flat, document, continuing)
            staged.append_storage_meta(facts.storage_meta)
        except BaseException as error:
            if facts.place is None:
                staged.slot.state = SlotState.EMPTY
            else:
                problem = str(problem_of(error, who.rank))[:ERROR_CHARACTERS_MAX]
                staged.slot.seal(table(self._layout, blocked_s=0.0, error=problem).to_document())
            raise
        table = functools.partial(table, layout=layout)
        seal = functools.partial(self._seal, staged, table, is_snapshot=is_snapshot)
        held_s = time.monotonic() - began
        if late is None:
            seal(held_s)
            return
        discard = functools.partial(self._discard, staged, table, is_snapshot)
        self._late = LateSave(late, facts.name, is_snapshot, held_s, seal, discard)

    def _seal(
        self,
        staged: StagedSlot,
        table: Callable[..., SlotTable],
        blocked_s: float,
        *,
        is_snapshot: bool,
    ) -> None:
        made = table(blocked_s=blocked_s)
        try:
            staged.slot.seal(made.to_document(), is_snapshot=is_snapshot)
        except ValueError as error:
            staged.slot.state = SlotState.EMPTY
            raise SaveError(f"step {made.step} cannot be staged: {error}") from error

    def _discard(
        self, staged: StagedSlot, table: Callable[..., SlotTable], is_snapshot: bool, why: str
    ) -> None:
        """Throw the image in a slot away. The step of a save then fails on all ranks."""
        if is_snapshot:
            staged.slot.state = SlotState.EMPTY
            return
        try:
            staged.slot.seal(table(blocked_s=0.0, error=why[:ERROR_CHARACTERS_MAX]).to_document())
        except ValueError:
            # The table is too long. The step is given up when this rank seals a later one.
            staged.slot.state = SlotState.EMPTY
            self._saves.drop(staged, why)

    def wait_for_slot(self, timeout_s: float) -> bool:
        """Wait until a slot is free, so that the next save does not wait. Return False if none."""
        return self._stage is None or self._saves.find_free(self._stage, timeout_s) is not None

    def _write(
        self,
        staged: StagedSlot,
        flat: Mapping[str, Any],
        document: bytes | None,
        continuing: Overlap,
    ) -> tuple[Layout, LateCopy | None]:
        """Copy all data into the slot. Return the layout, with the files of this save.

        Return also the copy that continues, if there is one.
        """
        assert self._layout is not None
        assert self._stage is not None
        late = staged.fill(flat, document, continuing.steady, is_trial=continuing.is_trial)
        try:
            self._stage.require_late()
        except BaseException:
            if isinstance(late, LateCopy):
                late.cancel()
            raise
        if isinstance(late, Trial):
            self._trial = late
            return self._layout, None
        return self._layout, late

    def _take_slot(self, stage: Stage, step: int, timeout_s: float) -> StagedSlot | None:
        staged = self._saves.find_free(stage, timeout_s)
        if staged is not None:
            staged.slot.begin(step)
        return staged
