"""Salvage after a crash: commit the newest step that all ranks of all nodes have sealed in memory.

Living ranks overwrite their snapshots, so the flusher reads snapshots only when all ranks of the
node are gone. Several nodes agree on one step through small files in the launch's folder. Each node
writes a list of its steps. The lowest node that is not lost reads the lists and writes the answer.
A node that gives up writes the answer "none". The answer is created exclusively, so all nodes have
the same one, and a step is never committed by some nodes alone.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.durable import create_bytes, make_directory, to_json, write_bytes
from holdfast.contracts.disk.filesystems import delay_s, is_there
from holdfast.contracts.errors import SaveError
from holdfast.trainer.flusher.commit import committer_of
from holdfast.trainer.flusher.plan import SlotKey, SlotView, StepGroup
from holdfast.trainer.flusher.shards import launch_folder, name_shards
from holdfast.trainer.slots.slot_table import SlotTable
from holdfast.trainer.slots.slots import SlotState

LISTS_WAIT_S: Final = 60.0
POLL_S: Final = 0.02
POLL_SLOW_S: Final = 0.25
QUICK_S: Final = 1.0
ANSWER: Final = "snapshots-answer.json"
_LIST = re.compile(r"snapshots-node-(\d{4,})\.json")


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
        # A snapshot that one local rank lacks would restore ranks to different steps.
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
    of the file system. Raises `SaveError` on all nodes if one writes no list in time, if a node
    without a list is in `lost`, or if `abandoned` returns a reason on one of them. Raises `OSError`
    if the folder is not usable.
    """
    node, nodes = table.node, table.nodes
    if nodes == 1:
        return newest_common([steps])
    folder = launch_folder(table.run, table.checkpoint)
    make_directory(folder)
    # The list is durable and complete before another node can read it.
    write_bytes(_list_path(folder, node), to_json({"node": node, "steps": list(steps)}))
    timeout_s = LISTS_WAIT_S + delay_s(folder) if timeout_s is None else timeout_s
    began = time.monotonic()
    lists: dict[int, list[int]] = {node: list(steps)}
    while not is_there(folder / ANSWER):
        waited_s, gone = time.monotonic() - began, set(lost())
        reader = committer_of(nodes, gone)
        silent = _silent_nodes(folder, lists, nodes) if node == reader else {reader or 0}
        if not silent:
            # Exclusive: of several nodes that give different answers, one wins, and all nodes read
            # that one.
            _answer(folder, step=newest_common(list(lists.values())))
            continue
        reason = abandoned() or _why_lost(folder, gone & silent)
        if reason is None and waited_s > timeout_s:
            named = sorted(silent)
            reason = f"nodes {named} did not list their snapshots within {timeout_s:.0f} s"
        if reason is not None:
            # An answer and not only an error here, so that no other node commits the step alone.
            _answer(folder, step=None, reason=reason)
            continue
        time.sleep(POLL_S if waited_s < QUICK_S else POLL_SLOW_S)
    answer = json.loads((folder / ANSWER).read_bytes())
    if reason := answer.get("reason"):
        raise SaveError(f"the snapshots in memory were given up: {reason}")
    return None if answer["step"] is None else int(answer["step"])


def _silent_nodes(folder: Path, lists: dict[int, list[int]], nodes: int) -> set[int]:
    """Add the lists that are not in `lists` yet; return the nodes that wrote none."""
    for name in os.listdir(folder):
        if (match := _LIST.fullmatch(name)) and int(match[1]) not in lists:
            content = json.loads((folder / name).read_bytes())
            lists[int(match[1])] = [int(step) for step in content["steps"]]
    return set(range(nodes)) - set(lists)


def _why_lost(folder: Path, missing: Collection[int]) -> str | None:
    """Return why lost nodes without a list prevent the salvage; None without such nodes."""
    if not missing:
        return None
    held = name_shards(folder, missing) or "their shards"
    return f"nodes {sorted(missing)} are lost, together with {held}"


def _answer(folder: Path, **answer: Any) -> None:
    """Write the answer for all nodes, unless another node has written one."""
    create_bytes(folder / ANSWER, to_json(answer))


def _list_path(folder: Path, node: int) -> Path:
    return folder / f"snapshots-node-{node:04d}.json"
