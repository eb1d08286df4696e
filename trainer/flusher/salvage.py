"""Salvage after a crash: commit the newest step that all ranks of all nodes have sealed in memory.

Living ranks overwrite their snapshots, so the flusher reads snapshots only when all ranks of the
node are gone. Several nodes agree on one step through small files in the launch's folder. Each node
writes a list of its steps and reads all lists, so all nodes reach the same answer. If a node does
not write its list in time, nothing is committed: a step is never committed by some nodes alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.durable import make_directory, to_json, write_bytes
from holdfast.contracts.errors import SaveError
from holdfast.contracts.filesystems import delay_s, refresh
from holdfast.trainer.flusher.plan import SlotKey, SlotView, StepGroup
from holdfast.trainer.flusher.shards import launch_folder, name_shards
from holdfast.trainer.staging.slot_table import SlotTable
from holdfast.trainer.staging.slots import SlotState

LISTS_WAIT_S: Final = 60.0
REFRESH_S: Final = 1.0
POLL_S: Final = 0.02


@dataclass(frozen=True)
class Salvage:
    """The snapshots of a crashed launch on one node.

    `groups` are the complete snapshots, newest first. `slots` are all slots with a snapshot. They
    are released when the step to commit has been chosen.
    """

    launch: int
    groups: tuple[StepGroup, ...]
    slots: tuple[SlotKey, ...]


def find_salvage(views: Sequence[SlotView], launch: int, committed_step: int) -> Salvage:
    """Return the snapshots that all local ranks have and that are newer than `committed_step`."""
    snapshots = [v for v in views if v.state is SlotState.SNAPSHOT and v.launch == launch]
    members: dict[tuple[int, str], list[SlotView]] = {}
    for view in snapshots:
        if view.step > committed_step:
            members.setdefault((view.step, view.checkpoint), []).append(view)
    groups = [
        StepGroup(launch, step, name, tuple(sorted(v.key for v in found)))
        for (step, name), found in sorted(members.items(), reverse=True)
        if {v.local_rank for v in found} == set(range(found[0].local_ranks))
    ]
    return Salvage(launch, tuple(groups), tuple(sorted(v.key for v in snapshots)))


def newest_common(lists: Sequence[Collection[int]]) -> int | None:
    """Return the newest step that is in every list, or None."""
    common = set(lists[0]).intersection(*lists[1:]) if lists else set()
    return max(common, default=None)


def agree(
    table: SlotTable,
    steps: Sequence[int],
    *,
    abandoned: Callable[[], str | None],
    lost: Callable[[], Collection[int]] = frozenset,
    timeout_s: float | None = None,
) -> int | None:
    """Return the step that all nodes commit, None when they have none in common.

    `table` is the table of any sealed slot. `timeout_s` defaults to `LISTS_WAIT_S` plus the delay
    of the file system. Raises `SaveError` if a node writes no list in time, if a node without a
    list is in `lost`, or if `abandoned` returns a reason. Raises `OSError` if the folder is not
    usable.
    """
    node, nodes = table.node, table.nodes
    if nodes == 1:
        return newest_common([steps])
    folder = launch_folder(table.run, table.checkpoint)
    make_directory(folder)
    _write_list(folder, node, steps)
    timeout_s = LISTS_WAIT_S + delay_s(folder) if timeout_s is None else timeout_s
    give_up = time.monotonic() + timeout_s
    refresh_at = 0.0
    while True:
        if time.monotonic() >= refresh_at:
            refresh(folder)
            refresh_at = time.monotonic() + REFRESH_S
        lists = {other: _read_list(folder, other) for other in range(nodes)}
        silent = [other for other, found in lists.items() if found is None]
        if not silent:
            return newest_common([found for found in lists.values() if found is not None])
        reason = abandoned()
        if missing := sorted(set(silent) & set(lost())):
            held = name_shards(folder, missing) or "their shards"
            reason = f"nodes {missing} are lost, together with {held}"
        if reason is None and time.monotonic() > give_up:
            reason = f"nodes {silent} did not list their snapshots within {timeout_s:.0f} s"
        if reason is not None:
            # Nodes that read the lists later must not count on this node.
            _write_list(folder, node, ())
            raise SaveError(f"the snapshots in memory were given up: {reason}")
        time.sleep(POLL_S)


def _list_path(folder: Path, node: int) -> Path:
    return folder / f"snapshots-node-{node:04d}.json"


def _write_list(folder: Path, node: int, steps: Sequence[int]) -> None:
    write_bytes(_list_path(folder, node), to_json({"node": node, "steps": list(steps)}))


def _read_list(folder: Path, node: int) -> list[int] | None:
    try:
        content = _list_path(folder, node).read_bytes()
    except FileNotFoundError:
        return None
    return [int(step) for step in json.loads(content)["steps"]]
