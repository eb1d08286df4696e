"""The flusher's writer thread: it writes and commits the steps that it is given, one by one."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.errors import HoldfastError, SaveError
from holdfast.trainer.flusher import files
from holdfast.trainer.flusher.commit import PeerState, report_incomplete
from holdfast.trainer.flusher.held_slot import HeldSlot
from holdfast.trainer.flusher.hints import Hints, log
from holdfast.trainer.flusher.plan import SlotKey, StepGroup
from holdfast.trainer.flusher.program_files import ProgramFile
from holdfast.trainer.flusher.salvage import (
    Agreed,
    Salvage,
    SalvagePlace,
    agree,
    list_nothing,
)
from holdfast.trainer.flusher.shards import ShardList
from holdfast.trainer.flusher.space_guard import SpaceGuard
from holdfast.trainer.mirror.worker import MirrorWorker
from holdfast.trainer.neighbour.exchange import Exchange
from holdfast.trainer.slots.slot_table import SlotTable
from holdfast.trainer.slots.slots import Slot, SlotState

Work = tuple[StepGroup, str | None] | Salvage | ShardList | ProgramFile
"""A step and the reason to give it up, if any, or something else to write."""


NO_WRITERS: Final[Mapping[int, int]] = {}


@dataclass(frozen=True)
class Finished:
    """The result of one step, as the writer thread reports it. `is_nothing`: there was none."""

    group: StepGroup
    committed: files.Committed | None
    error: str
    is_salvaged: bool = False
    is_nothing: bool = False


class Writer:
    """Writes what `put` queues, and adds each step's result to `finished`."""

    def __init__(
        self,
        held: Mapping[SlotKey, HeldSlot],
        mirror: MirrorWorker,
        space_guard: SpaceGuard,
        limit: files.WriteLimit,
        *,
        newest_launch: Callable[[], int],
        lost_nodes: Callable[[], frozenset[int]],
        wake: Callable[[], object],
        report: Callable[[], object],
        hints: Hints,
        exchange: Exchange,
    ) -> None:
        """`held` are the flusher's slots. `wake` is called after each result.

        `report` tells the agent, if any, that this node has written its part of a step. `exchange`
        has the copies of snapshots.
        """
        self._report, self._hints, self._exchange = report, hints, exchange
        self._held, self._mirror, self._space_guard = held, mirror, space_guard
        self._limit = limit
        self._newest_launch, self._lost_nodes, self._wake = newest_launch, lost_nodes, wake
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.finished: deque[Finished] = deque()
        # The steps whose saves this node has begun to write, by launch.
        self._tried: dict[int, set[int]] = {}
        self._thread = threading.Thread(target=self._serve, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: Work | None) -> None:
        """Queue something to write. None ends the thread."""
        self._work.put(item)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, ShardList):
                item.leave()
                continue
            if isinstance(item, ProgramFile):
                item.write()
                self._wake()
                continue
            if isinstance(item, Salvage):
                result = self._write_salvage(item)
            else:
                result = self._write_step(*item)
            self.finished.append(result)
            self._wake()

    def _write_step(self, group: StepGroup, given_up: str | None) -> Finished:
        # Those of earlier launches are of no use.
        tried = self._tried.setdefault(group.launch, set())
        tried.add(group.step)
        self._tried = {group.launch: tried}
        slots = [self._held[key] for key in group.slots]
        committed, error = None, ""
        try:
            images = [
                files.SlotImage(SlotTable.parse(held.slot.table), held.slot.data) for held in slots
            ]
            # A rank that could not copy its state seals its slot with the error, so that its peers
            # do not wait, see decision 71.
            given_up = given_up or next((i.table.error for i in images if i.table.error), None)
            if given_up is not None:
                report_incomplete(images[0].table, given_up)
                error = given_up
            else:
                resumed = any(held.resumed for held in slots)
                pace = self._limit.pace_of(group.launch, group.step)
                committed = self._commit(group, images, resumed=resumed, pace=pace)
        except (OSError, HoldfastError) as problem:
            error = str(problem)
        except Exception as problem:
            # A bug in one step must fail that step only. If the writer thread ended, every later
            # step would wait for ever.
            error = f"{type(problem).__name__}: {problem}"
        for held in slots:
            held.resumed = False
            if committed is not None:
                # The state is the last thing to change. From then on, the rank may overwrite the
                # slot.
                held.slot.state = SlotState.DONE
            else:
                held.slot.fail(error)
        return Finished(group, committed, error)

    def _commit(
        self,
        group: StepGroup,
        images: Sequence[files.SlotImage],
        *,
        resumed: bool = False,
        writers: Mapping[int, int] = NO_WRITERS,
        number: int = 1,
        pace: files.Pace = files.at_full_speed,
    ) -> files.Committed:
        """Write and commit a step; `writers` and `number` as `salvage.Agreed` has them."""
        peers = PeerState(
            self._abandonment_of(group),
            self._lost_nodes,
            self._report,
            self._hints,
            writers,
            number,
        )
        own, tables = images[0].table.node, [image.table for image in images]
        for owner in sorted(lost for lost, writer in writers.items() if writer == own):
            tables += self._write_for(owner, group.step, peers)
        done = files.commit_step(
            images, resumed=resumed, peers=peers, space_guard=self._space_guard, pace=pace
        )
        # Only after the commit: the mirror gets whole checkpoints only.
        self._mirror.take(tables)
        return done

    def _write_for(self, owner: int, step: int, peers: PeerState) -> list[SlotTable]:
        """Write a lost node's part of a step from the copies here; return its ranks' tables."""
        copied = self._exchange.copy_of(owner, step)
        if copied is None:
            raise SaveError(f"the copy of node {owner}'s snapshot of step {step} is gone")
        images = [
            files.SlotImage(t, data) for t, data in zip(copied.tables, copied.data, strict=True)
        ]
        expected = [entry for entries in copied.entries for entry in entries]
        files.write_for_lost(images, expected, peers=peers, space_guard=self._space_guard)
        log(f"the files of node {owner}, which is lost, were written from its copy here")
        return list(copied.tables)

    def _write_salvage(self, found: Salvage) -> Finished:
        """Commit the newest snapshot that all nodes have, and release the others."""
        copied = self._copied_steps(found)
        held = [self._held[key].slot for key in found.slots]
        snapshots = [slot for slot in held if slot.state is SlotState.SNAPSHOT]
        if not snapshots and not copied and found.place is not None:
            list_nothing(found.place)
            group = StepGroup(found.launch, 0, "", found.slots)
            return Finished(group, None, "", is_salvaged=True, is_nothing=True)
        result = self._commit_newest(found, snapshots, copied)
        # No rank of this launch is left, so nobody else releases these slots.
        for slot in snapshots:
            if slot.state is SlotState.SNAPSHOT:
                slot.state = SlotState.EMPTY
        self._exchange.forget()
        group = dataclasses.replace(result.group, slots=found.slots)
        return dataclasses.replace(result, group=group, is_salvaged=True)

    def _commit_newest(
        self, found: Salvage, snapshots: Sequence[Slot], copied: Sequence[int]
    ) -> Finished:
        """Commit the newest snapshot that all nodes have.

        If a node is lost before it has written its files, the others agree again.
        """
        newest = max([*(slot.step for slot in snapshots), *copied], default=0)
        nothing = StepGroup(found.launch, newest, f"the snapshot of step {newest}", ())
        result = Finished(nothing, None, "not every rank of every node has sealed a snapshot of it")
        agreed = None
        while result.committed is None:
            try:
                agreed = agree(
                    found.place or SalvagePlace.of(SlotTable.parse(snapshots[0].table)),
                    sorted({*(g.step for g in found.groups), *copied}),
                    abandoned=self._abandonment_of(nothing),
                    lost=self._lost_nodes,
                    held_for=lambda owner: self._exchange.held_for(owner, found.launch),
                    failed=agreed,
                )
            except (OSError, HoldfastError, ValueError, KeyError) as problem:
                # What failed first says more than why no other step can be committed.
                is_first = agreed is None
                error = f"{type(problem).__name__}: {problem}"
                return Finished(nothing, None, error) if is_first else result
            if agreed.step is None:
                return result
            if agreed.number > 1:
                log(f"step {result.group.step} is not committed: {result.error}")
            result = self._write_snapshot(found, agreed.step, agreed)
        return result

    def _copied_steps(self, found: Salvage) -> list[int]:
        """Return the steps that this node may commit from its own copies.

        A save may have had another state than a snapshot of the same step, and other nodes may have
        written their files of it.
        """
        copied = self._exchange.hold(found.launch)
        tried = self._tried.get(found.launch, set())
        return [step for step in copied if step > found.committed_step and step not in tried]

    def _write_snapshot(self, found: Salvage, step: int, agreed: Agreed) -> Finished:
        """Commit a snapshot from its slots, or from this node's own copy of it."""
        group = next((group for group in found.groups if group.step == step), None)
        committed, error = None, ""
        try:
            if group is not None:
                held = [self._held[key].slot for key in group.slots]
                images = [files.SlotImage(SlotTable.parse(slot.table), slot.data) for slot in held]
            else:
                images = self._images_of_copy(step)
                group = StepGroup(found.launch, step, images[0].table.checkpoint, ())
            committed = self._commit(
                group,
                images,
                resumed=agreed.number > 1,
                writers=agreed.writers,
                number=agreed.number,
            )
        except (OSError, HoldfastError) as problem:
            error = str(problem)
        except Exception as problem:
            # The writer thread must not end, see `_write_step`.
            error = f"{type(problem).__name__}: {problem}"
        group = group or StepGroup(found.launch, step, f"the snapshot of step {step}", ())
        return Finished(group, committed, error)

    def _images_of_copy(self, step: int) -> list[files.SlotImage]:
        """Return this node's own copy of a step. Raises `SaveError` if it is not intact."""
        copied = self._exchange.own_copy(step)
        if copied is None:
            raise SaveError(f"this node's copy of its snapshot of step {step} is gone")
        if damaged := copied.damage():
            raise SaveError(f"this node's copy of step {step} is damaged: {damaged[0]}")
        return [files.SlotImage(t, d) for t, d in zip(copied.tables, copied.data, strict=True)]

    def _abandonment_of(self, group: StepGroup) -> Callable[[], str | None]:
        def reason() -> str | None:
            if group.launch < self._newest_launch():
                return "a new launch began while other nodes' parts were missing"
            return None

        return reason
