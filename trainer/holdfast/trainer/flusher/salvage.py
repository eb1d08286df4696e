"""Salvage after a crash: commit the newest step that all ranks of all nodes have sealed in memory.

Living ranks overwrite their snapshots, so the flusher reads snapshots only when all ranks of the
node are gone. Several nodes agree on one step through small files in the launch's folder. Each node
writes a list of its steps. The lowest node that is not lost reads the lists and writes the answer.
A node that gives up writes the answer "none". The answer is created exclusively, so all nodes have
the same one, and a step is never committed by some nodes alone.

If nodes are lost, every other node also lists the copies of their snapshots that it holds for them
(`trainer.neighbour`). The answer then names for each lost node the one that writes its files.

A node may be lost after it has listed its snapshots and before it has written its files. Then the
others agree once more, and believe copies alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk import durable, filesystems
from holdfast.contracts.errors import SaveError
from holdfast.trainer.flusher import commit, shards
from holdfast.trainer.flusher.plan import SlotKey, SlotView, StepGroup
from holdfast.trainer.slots.slot_table import SlotTable
from holdfast.trainer.slots.slots import SlotState

LISTS_WAIT_S: Final = 60.0
POLL_S: Final = 0.02
POLL_SLOW_S: Final = 0.25
QUICK_S: Final = 1.0
_LIST = re.compile(r"snapshots-node-(\d{4,})\.json")
_COPIES = re.compile(r"copies-node-(\d{4,})\.json")


@dataclass(frozen=True)
class SalvagePlace:
    """Where nodes agree: in the launch's folder. `node` is this node, of `nodes`."""

    folder: Path
    node: int
    nodes: int

    @classmethod
    def of(cls, table: SlotTable) -> SalvagePlace:
        """Return the place for a sealed slot. Raises `SaveError` if its table is malformed."""
        return cls(shards.launch_folder(table.run, table.checkpoint), table.node, table.nodes)


@dataclass(frozen=True)
class Salvage:
    """The snapshots of a crashed launch on one node.

    `groups` are the complete snapshots, newest first. `slots` are all slots with a snapshot. They
    are released when the step to commit has been chosen. All are newer than `committed_step`.
    Without any snapshot, `slots` are all of the launch, and `place` is known from the ranks' plan.
    """

    launch: int
    groups: tuple[StepGroup, ...]
    slots: tuple[SlotKey, ...]
    committed_step: int = -1
    place: SalvagePlace | None = None


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
    slots = tuple(sorted(v.key for v in snapshots))
    return Salvage(launch, tuple(groups), slots, committed_step)


def newest_common(lists: Sequence[Collection[int]]) -> int | None:
    """Return the newest step that is in every list, or None."""
    common = set(lists[0]).intersection(*lists[1:]) if lists else set()
    return max(common, default=None)


@dataclass(frozen=True)
class Agreed:
    """What all nodes commit: `step`, None without a common one.

    `writers` has for each lost node the node that writes its files from copies. `number` counts the
    answers of a launch.
    """

    step: int | None
    writers: Mapping[int, int] = field(default_factory=dict)
    number: int = 1


def list_nothing(place: SalvagePlace) -> None:
    """Tell the other nodes that this node has no snapshot, so that they do not wait for its list.

    If storage fails, they wait.
    """
    with contextlib.suppress(OSError):
        durable.make_directory(place.folder)
        durable.write_bytes(_list_path(place.folder, place.node), _encode_list(place.node, ()))


def agree(
    place: SalvagePlace,
    steps: Sequence[int],
    *,
    abandoned: Callable[[], str | None],
    lost: Callable[[], Collection[int]] = frozenset,
    held_for: Callable[[int], Collection[int]] = lambda _: (),
    failed: Agreed | None = None,
) -> Agreed:
    """Return the step that all nodes commit.

    `held_for` returns the steps of a lost node of which this node has intact copies. `failed` is
    the answer before, which could not be committed. Raises `SaveError` on all nodes if one writes
    no list in time, if nobody can write the files of a node in `lost`, or if `abandoned` returns a
    reason on one of them. Raises `OSError` if the folder is not usable.
    """
    folder, node, nodes = place.folder, place.node, place.nodes
    if nodes == 1:
        return Agreed(newest_common([steps]) if failed is None else None)
    durable.make_directory(folder)
    number = 1 if failed is None else failed.number + 1
    answer = _answer_path(folder, number)
    # The list is durable and complete before another node can read it.
    durable.write_bytes(_list_path(folder, node), _encode_list(node, steps))
    timeout_s = LISTS_WAIT_S + filesystems.delay_s(folder)
    began, listed = time.monotonic(), frozenset[int]()
    lists: dict[int, list[int]] = {node: list(steps)}
    while not filesystems.is_there(answer):
        waited_s, gone = time.monotonic() - began, frozenset(lost())
        if gone != listed:
            listed = _list_copies(folder, node, gone, held_for)
        reader = commit.committer_of(nodes, gone)
        silent = _silent_nodes(folder, lists, nodes) if node == reader else {reader or 0}
        if not silent and not gone:
            # Exclusive: of several nodes that give different answers, one wins, and all nodes read
            # that one. Without a loss, the same step would fail again.
            common = newest_common(list(lists.values())) if failed is None else None
            _answer(answer, step=common)
            continue
        reason = abandoned()
        if reason is None and node == reader and gone and not silent - gone:
            if newest_common([own for one, own in lists.items() if one not in gone]) is None:
                # A node without snapshots lists no copies either.
                _answer(answer, step=None)
                continue
            copies = _read_copies(folder, gone)
            silent = set(range(nodes)) - gone - set(copies)
            if not silent:
                _answer(answer, **_decide(folder, lists, gone, copies, failed))
                continue
        if reason is None and waited_s > timeout_s:
            named = sorted(silent)
            reason = f"nodes {named} did not list their snapshots within {timeout_s:.0f} s"
        if reason is not None:
            # An answer and not only an error here, so that no other node commits the step alone.
            _answer(answer, step=None, reason=reason)
            continue
        time.sleep(POLL_S if waited_s < QUICK_S else POLL_SLOW_S)
    return _read_answer(answer, number)


def newest_covered(
    lists: Mapping[int, Collection[int]],
    gone: Collection[int],
    copies: Mapping[int, Mapping[int, Collection[int]]],
) -> Agreed:
    """Return the newest step that every node or a copy has.

    `lists` has the steps of each node that listed some, `copies` for each node that is not lost the
    steps that it holds for the nodes in `gone`. A lost node may have written its files before it
    was lost, so its own list counts where there are no copies.
    """
    own = [set(steps) for node, steps in lists.items() if node not in gone]
    common = set[int].intersection(*own) if own else set[int]()
    for step in sorted(common, reverse=True):
        writers: dict[int, int] = {}
        for owner in gone:
            holders = [node for node, held in copies.items() if step in held.get(owner, ())]
            if holders:
                writers[owner] = min(holders)
        if all(owner in writers or step in lists.get(owner, ()) for owner in gone):
            return Agreed(step, writers)
    return Agreed(None)


def _decide(
    folder: Path,
    lists: Mapping[int, Collection[int]],
    gone: Collection[int],
    copies: Mapping[int, Mapping[int, Collection[int]]],
    failed: Agreed | None,
) -> dict[str, Any]:
    """Return the answer after the loss of nodes: the step and its writers, or the reason."""
    if failed is not None:
        # The lost nodes have not written what they listed.
        lists = {node: steps for node, steps in lists.items() if node not in gone}
    agreed = newest_covered(lists, gone, copies)
    if failed is not None and (agreed.step, agreed.writers) == (failed.step, failed.writers):
        return {"step": None}
    if agreed.step is not None:
        return {"step": agreed.step, "writers": {str(n): w for n, w in agreed.writers.items()}}
    held = {owner for held in copies.values() for owner, steps in held.items() if steps}
    if unprotected := set(gone) - set(lists) - held:
        return {"step": None, "reason": _why_lost(folder, unprotected, gone)}
    if gone and held:
        reason = f"the copies of the lost nodes {sorted(held)} match no step of all other nodes"
        return {"step": None, "reason": reason}
    return {"step": None}


def _list_copies(
    folder: Path, node: int, gone: frozenset[int], held_for: Callable[[int], Collection[int]]
) -> frozenset[int]:
    """List the copies that this node holds for the lost nodes, and return these."""
    held = {str(owner): list(held_for(owner)) for owner in sorted(gone)}
    durable.write_bytes(_copies_path(folder, node), durable.to_json({"node": node, "held": held}))
    return gone


def _read_copies(folder: Path, gone: Collection[int]) -> dict[int, dict[int, list[int]]]:
    """Return the copies that nodes hold for all nodes in `gone`, by node and owner."""
    found = {}
    for name in os.listdir(folder):
        if (match := _COPIES.fullmatch(name)) and int(match[1]) not in gone:
            held = json.loads((folder / name).read_bytes())["held"]
            by_owner = {int(owner): [int(step) for step in steps] for owner, steps in held.items()}
            if by_owner.keys() >= set(gone):
                found[int(match[1])] = by_owner
    return found


def _read_answer(path: Path, number: int) -> Agreed:
    """Return an answer of all nodes. Raises `SaveError` if it is a reason."""
    answer = json.loads(path.read_bytes())
    if reason := answer.get("reason"):
        raise SaveError(f"the snapshots in memory were given up: {reason}")
    writers = {int(owner): int(writer) for owner, writer in answer.get("writers", {}).items()}
    return Agreed(None if answer["step"] is None else int(answer["step"]), writers, number)


def _silent_nodes(folder: Path, lists: dict[int, list[int]], nodes: int) -> set[int]:
    """Add the lists that are not in `lists` yet; return the nodes that wrote none."""
    for name in os.listdir(folder):
        if (match := _LIST.fullmatch(name)) and int(match[1]) not in lists:
            content = json.loads((folder / name).read_bytes())
            lists[int(match[1])] = [int(step) for step in content["steps"]]
    return set(range(nodes)) - set(lists)


def _why_lost(folder: Path, missing: Collection[int], gone: Collection[int]) -> str:
    """Return why lost nodes without a list and without copies prevent the salvage."""
    held = shards.name_shards(folder, missing) or "their shards"
    besides = sorted(set(gone) - set(missing))
    also = f", as nodes {besides} are" if besides else ""
    return f"nodes {sorted(missing)} are lost{also}, together with {held}"


def _answer(path: Path, **answer: Any) -> None:
    """Write the answer for all nodes, unless another node has written one."""
    durable.create_bytes(path, durable.to_json(answer))


def _answer_path(folder: Path, number: int) -> Path:
    return folder / ("snapshots-answer.json" if number == 1 else f"snapshots-answer-{number}.json")


def _copies_path(folder: Path, node: int) -> Path:
    return folder / f"copies-node-{node:04d}.json"


def _encode_list(node: int, steps: Sequence[int]) -> bytes:
    return durable.to_json({"node": node, "steps": list(steps)})


def _list_path(folder: Path, node: int) -> Path:
    return folder / f"snapshots-node-{node:04d}.json"
