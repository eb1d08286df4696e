"""What a save records about its step: the train state, the slot's table, the manifest's facts."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.records.topology import GLOBAL_BATCHES, LIMITS
from holdfast.contracts.version import holdfast_version
from holdfast.trainer.format.opcodes import encode_storage_meta
from holdfast.trainer.placed import PlacedName, SavePlace
from holdfast.trainer.planning.layout import Layout, encode_train_state, files_of
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.slots.slot_table import SlotTable


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step to save: its name and why it is saved. `train_state` is JSON that rank 0 writes.

    `place` is the directory that the program chose, None for a checkpoint of the run.
    """

    name: CheckpointName | PlacedName
    reason: str
    parent: str | None
    metrics: Mapping[str, float]
    train_state: Mapping[str, Any] | None
    place: SavePlace | None = None

    @property
    def storage_meta(self) -> bytes:
        """What is appended to `.metadata`. Checkpoints of a run have nothing there."""
        if self.place is None:
            return b""
        return encode_storage_meta(str(self.place.directory), self.place.save_id)

    def encode_train_state(self) -> bytes | None:
        """Return the content of `train_state.json`. Raises `SaveError` if it cannot be saved."""
        return None if self.train_state is None else encode_train_state(self.train_state)

    def for_manifest(self, who: Identity, mesh: Mapping[str, int]) -> dict[str, Any]:
        """Return the manifest's facts that rank 0 knows. `mesh` has the sizes of dimensions."""
        document = self.train_state or {}
        return {
            "run_uid": who.run_uid,
            "run": who.run,
            "name": str(self.name),
            "step": self.name.step,
            "attempt": who.attempt,
            "launch": who.launch,
            "world_size": who.world_size,
            "parent": self.parent,
            "reason": self.reason,
            "command_digest": who.command_digest,
            "versions": versions(),
            "topology": {
                "nodes": who.nodes,
                "ranks_per_node": who.local_ranks,
                "pipeline": who.stages,
                "mesh": mesh,
                **_rank_limits(document),
            },
            "skips": document.get("data", {}).get("skips", ()),
            "metrics": {key: float(value) for key, value in self.metrics.items()},
            "is_placed": self.place is not None,
        }


def _rank_limits(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what limits the rank counts that can continue, as the manifest's topology has it."""
    limits = {key: document[key] for key in LIMITS if document.get(key)}
    global_batch = document.get("data", {}).get("global_batch")
    return limits | ({GLOBAL_BATCHES: [global_batch]} if global_batch and not limits else {})


def make_table(
    facts: StepFacts,
    layout: Layout,
    who: Identity,
    *,
    run: RunPaths | None,
    node_folder: RunPaths | None,
    train_state_bytes: int | None,
    blocked_s: float,
    manifest: Mapping[str, Any] | None,
    error: str = "",
) -> SlotTable:
    """Return the table of a slot that is about to be sealed."""
    return SlotTable(
        run_directory=str(run.directory.absolute()) if run else "",
        node_folder=str(node_folder.directory) if node_folder and not facts.place else "",
        target=str(facts.place.directory) if facts.place else "",
        error=error,
        checkpoint=str(facts.name),
        step=facts.name.step,
        rank=who.rank,
        local_rank=who.local_rank,
        local_ranks=who.local_ranks,
        node=who.node,
        nodes=who.nodes,
        world_size=who.world_size,
        staged_at=time.time(),
        blocked_s=blocked_s,
        files=tuple(files_of(layout, train_state_bytes, facts.storage_meta)),
        manifest=manifest,
    )


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that a manifest records."""
    return {
        "holdfast": holdfast_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
