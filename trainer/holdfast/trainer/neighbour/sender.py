"""The thread that copies this node's snapshots and sends them to the neighbour.

It has at most two copies: the newest one that the neighbour holds, and the one that it sends. It
takes the next snapshot when the former one has arrived, so a slow network drops snapshots and never
queues them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.node.memory import free_memory
from holdfast.trainer.neighbour.keeper import RESERVE_BYTES, STRANGE, name_files
from holdfast.trainer.neighbour.line import Line, call
from holdfast.trainer.neighbour.node_copy import NodeCopy, copy_slots
from holdfast.trainer.slots.slots import Slot, SlotState

# A snapshot stays in its slot for at least the time of a step.
LOOK_S: Final = 0.005
RETRY_S: Final = 2.0
# The share of the time in which bytes are sent, so that ranks find the network free, too.
SENDING_SHARE: Final = 0.5

Find = Callable[[int], Sequence[Slot]]
"""Returns the slots of a launch that are on this node."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """Where the copies of a launch go. `place` is the address file of the neighbour's flusher."""

    launch: int
    node: int
    holder: int
    place: Path


@dataclass(frozen=True, kw_only=True)
class Protection:
    """What the neighbour holds: `step` of `launch`, and why it holds nothing newer, if so."""

    launch: int
    holder: int
    step: int = -1
    problem: str = ""


class Sender:
    """Sends what `find` finds to the neighbour of the newest `Aim`."""

    def __init__(
        self,
        find: Find,
        *,
        reading: threading.Lock,
        report: Callable[[Protection], object],
    ) -> None:
        """`reading` is held while slots are read. `report` is called when something has changed."""
        self._find, self._reading, self._report = find, reading, report
        self._aim: Aim | None = None
        self._changed = threading.Event()
        self._is_closed = self._is_held = False
        self._lock = threading.Lock()
        self._own: list[NodeCopy] = []
        self._line: Line | None = None
        self._thread = threading.Thread(target=self._serve, name="to the neighbour", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def aim(self, aim: Aim) -> None:
        """Send the snapshots of another launch from now on."""
        self._aim = aim
        self._is_held = False
        self._changed.set()

    def hold(self, launch: int) -> list[int]:
        """Take no more snapshots; return the steps of which this node has its own copies."""
        with self._lock:
            self._is_held = True
            return sorted({own.step for own in self._own if own.launch == launch}, reverse=True)

    def copy_of(self, step: int) -> NodeCopy | None:
        """Return this node's own copy of a step, None if there is none."""
        with self._lock:
            return next((own for own in self._own if own.step == step), None)

    def close(self) -> None:
        """Hang up, and free the copies."""
        self._is_closed = True
        self._changed.set()
        self._thread.join(RETRY_S)
        self.forget()

    def forget(self) -> None:
        """Free the copies of this node's snapshots."""
        with self._lock:
            for own in self._own:
                own.close()
            self._own = []

    def _serve(self) -> None:
        while not self._is_closed:
            aim = self._aim
            self._changed.clear()
            if aim is not None and not self._is_held:
                self._send_all(aim)
            self._hang_up()
            self._changed.wait(RETRY_S)

    def _send_all(self, aim: Aim) -> None:
        """Send snapshots until there is another aim or the connection fails."""
        self.forget()
        held, problem = -1, ""

        def is_over() -> bool:
            return self._is_closed or self._aim != aim or self._is_held

        while not is_over():
            step, found = held, ""
            try:
                copied = self._take_next(aim, held, is_over)
                if copied is None:
                    return
                step = copied.step
                found = self._send(aim, copied, held if held >= 0 else None, is_over)
            except STRANGE as error:
                found = f"{type(error).__name__}: {error}"
                self._hang_up()
            if is_over():
                return
            held = held if found else step
            self._keep_only(held)
            if found != problem or not found:
                self._report(
                    Protection(launch=aim.launch, holder=aim.holder, step=held, problem=found)
                )
            problem = found
            if found:
                self._changed.wait(RETRY_S)

    def _take_next(self, aim: Aim, after: int, is_over: Callable[[], bool]) -> NodeCopy | None:
        """Wait for a newer snapshot of all local ranks, and copy it. Returns None once over."""
        while not is_over():
            # Meanwhile, no slot is freed.
            with self._reading:
                slots = newest_snapshot(self._find(aim.launch), after)
                copied = self._copy(aim.launch, slots) if slots else None
            if copied is not None:
                return copied
            time.sleep(LOOK_S)
        return None

    def _copy(self, launch: int, slots: Sequence[Slot]) -> NodeCopy | None:
        size, free = sum(len(slot.data) for slot in slots), free_memory()
        if free is not None and free - size < RESERVE_BYTES:
            raise MemoryError(
                f"{free >> 20} MiB of memory are free on this node, but a copy takes "
                f"{size >> 20} MiB and {RESERVE_BYTES >> 20} MiB must stay free"
            )
        copied = copy_slots(launch, slots)
        if copied is not None:
            with self._lock:
                if self._is_held:
                    copied.close()
                    return None
                self._own.append(copied)
        return copied

    def _send(
        self, aim: Aim, copied: NodeCopy, keep: int | None, is_over: Callable[[], bool]
    ) -> str:
        """Send a step; return why the neighbour does not hold it, or ''."""
        if self._line is None:
            hello = {"node": aim.node, "launch": aim.launch}
            self._line = call(aim.place, hello, is_over)
        line = self._line
        line.send("begin", record=copied.record(), keep=keep)
        answer = line.expect("ready", "refused")
        if answer["kind"] == "refused":
            return f"the neighbour keeps no copy: {answer['reason']}"
        blocks = list(copied.blocks())
        for number in answer["lacks"]:
            block = blocks[number]
            began = time.monotonic()
            line.send("block", copied.content(block.rank, block.at, block.bytes), number=number)
            time.sleep((time.monotonic() - began) * (1 / SENDING_SHARE - 1))
        line.send("end")
        answer = line.expect("held", "damaged")
        if answer["kind"] == "damaged":
            named = name_files(answer["files"]) or "its node reads the copies after a crash"
            return f"the copy of step {copied.step} did not arrive intact: {named}"
        return ""

    def _keep_only(self, step: int) -> None:
        """Free the copies of other steps, unless they are needed for a commit."""
        with self._lock:
            if self._is_held:
                return
            for own in self._own:
                if own.step != step:
                    own.close()
            self._own = [own for own in self._own if own.step == step]

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def newest_snapshot(slots: Sequence[Slot], after: int) -> list[Slot]:
    """Return the slots of the newest step after `after` that most ranks have as a snapshot.

    Whether all ranks have it is for `copy_slots` to say.
    """
    found: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.state is SlotState.SNAPSHOT and slot.step > after:
            found.setdefault(slot.step, []).append(slot)
    newest = max(found, key=lambda step: (len(found[step]), step), default=None)
    return [] if newest is None else found[newest]
