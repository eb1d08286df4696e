"""The flusher's writer thread: it writes and commits the steps that it is given, one by one."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.contracts.errors import HoldfastError
from holdfast.trainer.flusher.commit import PeerState, report_incomplete
from holdfast.trainer.flusher.files import Committed, Image, commit_step
from holdfast.trainer.flusher.held_slot import HeldSlot
from holdfast.trainer.flusher.hints import Hints
from holdfast.trainer.flusher.plan import SlotKey, StepGroup
from holdfast.trainer.flusher.program_files import ProgramFile
from holdfast.trainer.flusher.salvage import Salvage, agree
from holdfast.trainer.flusher.shards import ShardList
from holdfast.trainer.flusher.space_guard import SpaceGuard
from holdfast.trainer.mirror.worker import MirrorWorker
from holdfast.trainer.slots.slot_table import SlotTable
from holdfast.trainer.slots.slots import SlotState

Work = tuple[StepGroup, str | None] | Salvage | ShardList | ProgramFile
"""A step and the reason to give it up, if any, or something else to write."""


@dataclass(frozen=True)
class Finished:
    """The result of one step, as the writer thread reports it."""

    group: StepGroup
    committed: Committed | None
    error: str
    is_salvaged: bool = False


class Writer:
    """Writes what `put` queues, and adds each step's result to `finished`."""

    def __init__(
        self,
        held: Mapping[SlotKey, HeldSlot],
        mirror: MirrorWorker,
        space_guard: SpaceGuard,
        *,
        newest_launch: Callable[[], int],
        lost_nodes: Callable[[], frozenset[int]],
        wake: Callable[[], object],
        report: Callable[[], object],
        hints: Hints,
    ) -> None:
        """`held` are the flusher's slots. `wake` is called after each result.

        `report` tells the agent, if any, that this node has written its part of a step.
        """
        self._report, self._hints = report, hints
        self._held, self._mirror, self._space_guard = held, mirror, space_guard
        self._newest_launch, self._lost_nodes, self._wake = newest_launch, lost_nodes, wake
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.finished: deque[Finished] = deque()
        self._thread = threading.Thread(target=self._serve, name="writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
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
        slots = [self._held[key] for key in group.slots]
        try:
            images = [Image(SlotTable.parse(held.slot.table), held.slot.data) for held in slots]
            given_up = given_up or next((i.table.error for i in images if i.table.error), None)
            if given_up is not None:
                report_incomplete(images[0].table, given_up)
                committed, error = None, given_up
            else:
                resumed = any(held.resumed for held in slots)
                peers = PeerState(
                    self._abandonment_of(group), self._lost_nodes, self._report, self._hints
                )
                committed, error = (
                    commit_step(
                        images, resumed=resumed, peers=peers, space_guard=self._space_guard
                    ),
                    "",
                )
                self._mirror.take([image.table for image in images])
        except (OSError, HoldfastError) as problem:
            committed, error = None, str(problem)
        except Exception as problem:
            # A bug in one step must fail that step only. If the writer thread ended, every later
            # step would wait for ever.
            committed, error = None, f"{type(problem).__name__}: {problem}"
        for held in slots:
            held.resumed = False
            if committed is not None:
                held.slot.state = SlotState.DONE
            else:
                held.slot.fail(error)
        return Finished(group, committed, error)

    def _write_salvage(self, found: Salvage) -> Finished:
        """Commit the newest snapshot that all nodes have, and release the others."""
        newest = max((self._held[key].slot.step for key in found.slots), default=0)
        nothing = StepGroup(found.launch, newest, f"the snapshot of step {newest}", ())
        result = Finished(nothing, None, "not every rank of every node has sealed a snapshot of it")
        try:
            table = SlotTable.parse(self._held[found.slots[0]].slot.table)
            steps = [group.step for group in found.groups]
            abandoned = self._abandonment_of(nothing)
            step = agree(table, steps, abandoned=abandoned, lost=self._lost_nodes)
            chosen = next((group for group in found.groups if group.step == step), None)
            if chosen is not None:
                result = self._write_step(chosen, None)
        except (OSError, HoldfastError, ValueError, KeyError) as problem:
            result = Finished(nothing, None, f"{type(problem).__name__}: {problem}")
        for key in found.slots:
            if self._held[key].slot.state is SlotState.SNAPSHOT:
                self._held[key].slot.state = SlotState.EMPTY
        group = dataclasses.replace(result.group, slots=found.slots)
        return dataclasses.replace(result, group=group, is_salvaged=True)

    def _abandonment_of(self, group: StepGroup) -> Callable[[], str | None]:
        def reason() -> str | None:
            if group.launch < self._newest_launch():
                return "a new launch began while other nodes' parts were missing"
            return None

        return reason
