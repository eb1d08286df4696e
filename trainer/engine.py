"""The checkpoint engine: what a rank calls to save, to learn what became of it, and to load.

The ranks plan together once. After that a save is a copy into memory and a seal, without
communication. The node's flusher does the rest while training goes on.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from holdfast.contracts.durable import to_json
from holdfast.contracts.environment import FLUSH_TIMEOUT_DEFAULT_S as SAVE_TIMEOUT_S
from holdfast.contracts.errors import SaveError
from holdfast.contracts.mirrors import Tiers
from holdfast.contracts.paths import CheckpointName, RunPaths
from holdfast.contracts.slots import SlotState
from holdfast.trainer.collective import HierarchicalGroup
from holdfast.trainer.identity import Identity
from holdfast.trainer.loading.reader import LoadReport, load_state
from holdfast.trainer.planning.custom import plan_custom
from holdfast.trainer.planning.layout import (
    TRAIN_STATE_BYTES_MAX,
    Layout,
    check_unchanged,
    files_of,
    find_changes,
    flatten,
    local_part,
)
from holdfast.trainer.planning.ranks import all_or_none, check_memory, plan_together
from holdfast.trainer.planning.topology import describe_mesh
from holdfast.trainer.staging.copying import find_gpu
from holdfast.trainer.staging.stage import FlusherConnection, Stage, StagedSlot

POLL_S: Final = 0.002


@dataclass(frozen=True)
class SaveResult:
    """What became of one save: committed, or the reason why not."""

    step: int
    checkpoint: str
    committed: bool
    error: str | None = None


class CheckpointEngine:
    """One rank's saves and loads.

    `flusher` is the file by which the node's flusher is found, called by `prepare`. `group` is a
    gloo group over all ranks, or None for a single process; `stage_group` one over the ranks of
    this pipeline stage, where `identity` names one. A `planner` of the user's own plans every save
    again, with all ranks; without one, or with one that is just stock DCP's, the plan is kept.
    """

    def __init__(
        self,
        *,
        flusher: str,
        run: RunPaths,
        identity: Identity,
        group: dist.ProcessGroup | None,
        stage_group: dist.ProcessGroup | None = None,
        planner: SavePlanner | None = None,
    ) -> None:
        self._run, self._identity, self._group = run, identity, group
        tiers = Tiers.from_environment(os.environ)
        self._node_folder = tiers.node_folder(identity.run, identity.run_uid)
        self._connection = FlusherConnection(flusher, identity)
        self._stage_group = group if identity.stage is None else stage_group
        self._planner = None if type(planner) is DefaultSavePlanner else planner
        self._layout: Layout | None = None
        self._stage: Stage | None = None
        self._in_flight: dict[StagedSlot, CheckpointName] = {}
        self._mesh: dict[str, int] = {}
        self._tensor_bytes = 0
        self._results: list[SaveResult] = []
        self._last_committed: str | None = None
        self._compared: tuple[dict[str, Any], dict[str, Any]] | None = None

    @property
    def last_committed(self) -> str | None:
        """Directory name of the newest save of this engine known to be committed."""
        self._collect()
        return self._last_committed

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensors that this rank writes at each save; 0 before anything is planned."""
        return self._tensor_bytes

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps that are staged and neither committed nor failed yet."""
        self._collect()
        return tuple(sorted(name.step for name in self._in_flight.values()))

    def prepare(self, state: dict[str, Any], *, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Plan for states like `state` and get the slots; the next save is then like any other.

        All ranks call it together: before the first save, and again when the state of one of
        them has changed. It waits at most `timeout_s` seconds for saves of the former plan.
        Raises `SaveError` on all ranks when one cannot save its state or get its slots.
        """
        if self._planner is not None:
            self._build_custom(self._planner, state, timeout_s)
        else:
            self._build(state, timeout_s)

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait until the memory of the slots is there; False when it is not in `timeout_s` seconds.

        A save need not wait for that: it then takes the missing pages one by one, and is slower.
        """
        return self._stage is None or self._stage.wait_until_ready(timeout_s)

    def changes(self, state: dict[str, Any]) -> str | None:
        """What no longer fits the plan, in words for people; None while a save needs no new one.

        Also why the plan cannot be used, where `.metadata` could not be made beside training; the
        next `prepare` then raises it on all ranks.
        A save of this very `state` right after it does not compare again.
        Raises `SaveError` when the state cannot be saved at all.
        """
        if self._planner is not None:
            return None
        if self._layout is None:
            return "nothing is planned yet"
        flat = flatten(state)
        found = find_changes(self._layout, flat)
        if found is None and self._stage is not None:
            found = self._stage.problem
        self._compared = None if found else (state, flat)
        return found

    @property
    def awaits_metadata(self) -> bool:
        """True while `.metadata` is made beside training; a save waits for it before it seals."""
        return self._stage is not None and not self._stage.is_late_done

    def wait_for_metadata(self) -> str | None:
        """Wait until `.metadata` is in the slots; why it never will be, in words for people."""
        return None if self._stage is None else self._stage.wait_for_metadata()

    def save(
        self,
        state: dict[str, Any],
        train_state: Mapping[str, Any],
        *,
        step: int,
        reason: str,
        parent: str | None,
        metrics: Mapping[str, float] | None = None,
        must: bool = False,
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> str | None:
        """Stage `state` as the checkpoint of `step` and return its directory name.

        All ranks call it after the same step. On return the state may change; `poll` tells when
        it is committed. `train_state` is JSON, written by rank 0. None means that both slots are
        still being written and this save was passed over; with `must` it waits for a free one.
        A first save without `prepare` plans with all ranks, and so does each with a planner of
        the user's; others plan nothing.
        Raises `SaveError` when the state cannot be saved, is another than was planned, does not
        fit into memory, or no slot came free within `timeout_s` seconds.
        """
        began = time.monotonic()
        stage, flat = self._planned(state, timeout_s)
        document = self._encode_train_state(train_state)
        staged = self._take_slot(stage, step, timeout_s if must else 0.0)
        if staged is None and must:
            raise SaveError(
                f"step {step}: no staging slot came free within {timeout_s:.0f} s, steps "
                f"{list(self.in_flight)} are still being written; storage may be hanging"
            )
        if staged is None:
            self._connection.notify("skipped", step=step)
            return None
        name = self._name(step)
        table = self._fill(staged, flat, document, name, began)
        if self._identity.rank == 0:
            table["manifest"] = self._manifest_facts(name, reason, parent, metrics, train_state)
        staged.slot.seal(table)
        self._in_flight[staged] = name
        self._connection.notify("sealed", step=step)
        return str(name)

    def snapshot(
        self,
        state: dict[str, Any],
        train_state: Mapping[str, Any],
        *,
        step: int,
        reason: str,
        parent: str | None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Keep `state` in memory alone, to be committed as `step` only if the ranks die.

        It overwrites the older snapshot, and never what is being written: False says that it was
        passed over because no slot was free. Each rank decides that for itself; after a crash
        the newest step that all of them have is committed. Raises `SaveError` when the state
        cannot be saved or is another than was planned.
        """
        began = time.monotonic()
        if self._layout is None or self._stage is None or self._planner is not None:
            return False
        if self.awaits_metadata or self._stage.problem is not None:
            return False
        self._connection.keep_up()
        flat = self._checked(self._layout, state)
        document = self._encode_train_state(train_state)
        staged = self._take_slot(self._stage, step, 0.0)
        if staged is None:
            return False
        name = self._name(step)
        table = self._fill(staged, flat, document, name, began)
        if self._identity.rank == 0:
            table["manifest"] = self._manifest_facts(name, reason, parent, metrics, train_state)
        staged.slot.seal(table, is_snapshot=True)
        return True

    def discard_snapshots(self, step: int | None = None) -> None:
        """Give up what is in memory alone, or the snapshot of `step` only."""
        for staged in self._stage.slots if self._stage else ():
            slot = staged.slot
            if slot.state is SlotState.SNAPSHOT and step in {None, slot.step}:
                slot.state = SlotState.EMPTY

    def poll(self) -> list[SaveResult]:
        """Results since the last call, oldest first; reads shared memory and nothing else."""
        self._collect()
        results, self._results = self._results, []
        return results

    def wait(self, timeout_s: float = SAVE_TIMEOUT_S) -> list[SaveResult]:
        """Wait until nothing of this rank is in flight; returns results as `poll` does.

        After `timeout_s` seconds it returns what there is; `in_flight` then names the rest.
        """
        give_up = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < give_up:
            time.sleep(POLL_S)
        return self.poll()

    def load(
        self,
        directory: Path,
        state: dict[str, Any],
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        exclude: Collection[str] = (),
    ) -> LoadReport:
        """Load a checkpoint, ours or stock DCP's, in place into `state`; see `load_state`."""
        return load_state(
            directory, state, group=self._group, strict=strict, rename=rename, exclude=exclude
        )

    def close(self) -> None:
        """Let slots and flusher go; what is sealed is committed all the same."""
        if self._stage is not None:
            self._collect()
            self._stage.close()
            self._stage = self._layout = None
            self._in_flight.clear()
        self._connection.close()
        self._group = self._stage_group = None
        self.__dict__.pop("_trees", None)

    def _planned(self, state: dict[str, Any], timeout_s: float) -> tuple[Stage, Mapping[str, Any]]:
        """The plan's slots, and what to copy into them."""
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
        """Plan with all ranks and get slots for the plan; all succeed or all raise."""
        tree, stage_tree = self._trees
        layout = plan_together(
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
        """Plan one save with the user's planner; new slots only when its layout is another."""
        tree, stage_tree = self._trees
        made = plan_custom(
            planner, state, identity=self._identity, tree=tree, stage_tree=stage_tree
        )
        if tree.agree(None if self._layout == made.layout else "another layout"):
            all_or_none(tree, self._identity.rank, lambda: self._release_old_stage(timeout_s))
            self._open_stage(made.layout, made.values)
        return made.values

    @functools.cached_property
    def _trees(self) -> tuple[HierarchicalGroup, HierarchicalGroup]:
        """The groups of all ranks and of the ranks of this pipeline stage."""
        who = self._identity
        whole = HierarchicalGroup(self._group, who.node)
        is_whole = who.stage is None
        return whole, whole if is_whole else HierarchicalGroup(self._stage_group, who.node)

    def _open_stage(self, layout: Layout, values: Mapping[str, Any]) -> None:
        tree, _ = self._trees
        check_memory(tree, self._identity.node, layout.image_bytes, self._connection.held_bytes)
        self._mesh = dict(self._identity.mesh) or describe_mesh(values)
        who = self._identity

        def open_it() -> Stage:
            gpu = find_gpu(local_part(values[place.key]) for place in layout.tensors)
            return Stage(self._connection, layout, gpu=gpu)

        self._stage = all_or_none(tree, who.rank, open_it)
        self._connection.describe(layout, self._run.attempt(who.attempt).launch(who.launch))
        self._layout = layout
        self._tensor_bytes = sum(place.bytes for place in layout.tensors)

    def _release_old_stage(self, timeout_s: float) -> None:
        """Before a new plan: what was staged by the old one must be written, then let go."""
        if self._stage is None:
            return
        self._results = self.wait(timeout_s)
        if self._in_flight:
            raise SaveError(
                f"steps {list(self.in_flight)} were not written within {timeout_s:.0f} s, so the "
                "layout cannot be built again; storage may be hanging"
            )
        self.discard_snapshots()
        problem = self._stage.problem
        self._stage.close()
        self._stage = self._layout = None
        if problem is not None:
            raise SaveError(problem)

    # --- one save -------------------------------------------------------------------------

    def _checked(self, layout: Layout, state: dict[str, Any]) -> dict[str, Any]:
        """`state` flattened; raises `SaveError` when it does not fit `layout`."""
        compared, self._compared = self._compared, None
        if compared is not None and compared[0] is state:
            return compared[1]
        flat = flatten(state)
        check_unchanged(layout, flat)
        return flat

    def _name(self, step: int) -> CheckpointName:
        return CheckpointName(step, self._identity.attempt, self._identity.launch)

    def _fill(
        self,
        staged: StagedSlot,
        flat: Mapping[str, Any],
        document: bytes | None,
        name: CheckpointName,
        began: float,
    ) -> dict[str, Any]:
        """Copy everything into the slot; returns its table. A slot that failed is free again."""
        assert self._layout is not None
        assert self._stage is not None
        try:
            staged.fill(flat, document)
            self._stage.require_late()
        except BaseException:
            staged.slot.state = SlotState.EMPTY
            raise
        return self._make_table(name, self._layout, document, time.monotonic() - began)

    def _take_slot(self, stage: Stage, step: int, timeout_s: float) -> StagedSlot | None:
        give_up = time.monotonic() + timeout_s
        while True:
            self._collect()
            staged = stage.free()
            if staged in self._in_flight:
                # Written since it was looked at; filled now, its save would never be told of.
                continue
            if staged is not None:
                staged.slot.begin(step)
                return staged
            if time.monotonic() >= give_up:
                return None
            time.sleep(POLL_S)

    def _collect(self) -> None:
        """Move what the flusher has decided from the slots to the results."""
        for staged, name in sorted(self._in_flight.items(), key=lambda item: item[1]):
            state = staged.slot.state
            if state is SlotState.DONE:
                self._results.append(SaveResult(name.step, str(name), True))
                self._last_committed = str(name)
            elif state is SlotState.FAILED:
                self._results.append(SaveResult(name.step, str(name), False, staged.slot.error))
            else:
                continue
            del self._in_flight[staged]

    def _encode_train_state(self, train_state: Mapping[str, Any]) -> bytes | None:
        if self._identity.rank != 0:
            return None
        try:
            content = to_json(dict(train_state))
        except (TypeError, ValueError) as error:
            raise SaveError(
                f"the train state is not JSON: {error}; put tensors into the state, and numbers, "
                "text, lists and mappings here"
            ) from error
        if len(content) > TRAIN_STATE_BYTES_MAX:
            raise SaveError(
                f"the train state is {len(content)} bytes of JSON, expected "
                f"{TRAIN_STATE_BYTES_MAX} or less; put bulk into the state as tensors"
            )
        return content

    def _make_table(
        self, name: CheckpointName, layout: Layout, document: bytes | None, blocked_s: float
    ) -> dict[str, Any]:
        who = self._identity
        files = files_of(layout, None if document is None else len(document))
        return {
            "run_directory": str(self._run.directory.absolute()),
            "node_folder": str(self._node_folder.directory) if self._node_folder else "",
            "checkpoint": str(name),
            "step": name.step,
            "rank": who.rank,
            "local_rank": who.local_rank,
            "local_ranks": who.local_ranks,
            "node": who.node,
            "nodes": who.nodes,
            "world_size": who.world_size,
            "staged_at": time.time(),
            "blocked_s": blocked_s,
            "files": [{"path": f.path, "offset": f.offset, "bytes": f.bytes} for f in files],
        }

    def _manifest_facts(
        self,
        name: CheckpointName,
        reason: str,
        parent: str | None,
        metrics: Mapping[str, float] | None,
        train_state: Mapping[str, Any],
    ) -> dict[str, Any]:
        who = self._identity
        return {
            "run_uid": who.run_uid,
            "run": who.run,
            "name": str(name),
            "step": name.step,
            "attempt": who.attempt,
            "launch": who.launch,
            "world_size": who.world_size,
            "parent": parent,
            "reason": reason,
            "command_digest": who.command_digest,
            "versions": _versions(),
            "topology": {
                "nodes": who.nodes,
                "ranks_per_node": who.local_ranks,
                "pipeline": who.stages,
                "mesh": self._mesh,
            },
            "skips": train_state.get("data", {}).get("skips", ()),
            "metrics": {key: float(value) for key, value in (metrics or {}).items()},
        }


@functools.cache
def _versions() -> dict[str, str]:
    return {
        "holdfast": importlib.metadata.version("holdfast"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
