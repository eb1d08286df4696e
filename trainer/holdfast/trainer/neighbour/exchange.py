"""One node's part in the exchange of snapshots with its neighbours, as the flusher uses it.

All nodes must copy the same step, or a lost node's copy would fit no step of the others. So node
0's agent begins each round: all nodes copy the first snapshot from a step on that none of them has
reached. The next round begins when all copies have arrived. A slow network therefore drops
snapshots and never queues them. A node has two copies at most: that of the last round in which all
copies arrived, and that of the present one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.node import handshake, limits
from holdfast.trainer.neighbour.line import Line, call
from holdfast.trainer.neighbour.node_copy import NodeCopy, copy_slots
from holdfast.trainer.neighbour.receiver import RESERVE_BYTES, STRANGE, CopyReceiver, name_files
from holdfast.trainer.slots.slots import Slot, SlotState

# A snapshot stays in its slot for at least the time of a step.
LOOK_S: Final = 0.005
CLOSE_S: Final = 2.0
WAKE_S: Final = 1.0
# How often one round tries to send its step.
TRIES_MAX: Final = 2
# The neighbour's flusher may start later.
DIAL_WAIT_S: Final = 20.0
DIAL_POLL_S: Final = 0.2
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
class Round:
    """One round: copy the first snapshot from `number` on, and keep the copy of step `keep`."""

    number: int = 0
    keep: int = -1


@dataclass(frozen=True, kw_only=True)
class Protection:
    """How a round ended: the neighbour holds `step`, or -1 because of `problem`.

    `is_missed`: the ranks were faster than the round. The next one may begin at a later step.
    """

    launch: int
    holder: int
    round: int
    step: int = -1
    problem: str = ""
    is_missed: bool = False


class MissedError(Exception):
    """The ranks were faster than the round."""


class Sender:
    """Sends what `find` finds to the neighbour of the newest `Aim`."""

    def __init__(
        self,
        find: Find,
        *,
        reading: threading.Lock,
        report: Callable[[Protection], object],
    ) -> None:
        """`reading` is held while slots are read. `report` is called at the end of each round."""
        self._find, self._reading, self._report = find, reading, report
        self._aim: Aim | None = None
        self._round = Round()
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
        self._aim, self._round = aim, Round()
        self._is_held = False
        self._changed.set()

    def begin(self, round_: Round) -> None:
        """Copy and send another step."""
        self._round = round_
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
        self._thread.join(CLOSE_S)
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
            if aim is not None and not self._is_held:
                self.forget()
                self._follow(aim)
            self._hang_up()
            self._changed.wait(WAKE_S)
            self._changed.clear()

    def _follow(self, aim: Aim) -> None:
        """Do round after round until there is another aim."""
        done: Round | None = None

        def is_over() -> bool:
            return self._is_closed or self._aim != aim or self._is_held

        while not is_over():
            round_ = self._round
            if round_ == done:
                self._changed.wait(WAKE_S)
                self._changed.clear()
                continue
            ended = self._run(aim, round_, is_over)
            done = round_
            if ended is not None:
                self._report(ended)

    def _run(self, aim: Aim, round_: Round, is_over: Callable[[], bool]) -> Protection | None:
        """Do one round; return how it ended, None if it was given up."""

        def is_stale() -> bool:
            return is_over() or self._round != round_

        self._keep_only(round_.keep)
        ended = Protection(launch=aim.launch, holder=aim.holder, round=round_.number)
        problem, copied = "", None
        for _ in range(TRIES_MAX):
            try:
                if copied is None:
                    copied = self._take(aim, round_, is_stale)
                problem = self._send(aim, copied, round_.keep, is_stale)
                if not problem:
                    return replace(ended, step=copied.step)
            except MissedError as error:
                return replace(ended, problem=str(error), is_missed=True)
            except STRANGE as error:
                problem = f"{type(error).__name__}: {error}"
                self._hang_up()
            if is_stale():
                return None
        return replace(ended, problem=problem)

    def _take(self, aim: Aim, round_: Round, is_over: Callable[[], bool]) -> NodeCopy:
        """Wait for the round's snapshot, and copy it. Raises `MissedError` if it is too late."""
        is_early, first = round_.number == 0, -1
        while not is_over():
            # Meanwhile, no slot is freed.
            with self._reading:
                kept = [s for s in self._find(aim.launch) if s.state is SlotState.SNAPSHOT]
                is_early = is_early or any(slot.step < round_.number for slot in kept)
                due = min((slot.step for slot in kept if slot.step >= round_.number), default=-1)
                if due >= 0 and (not is_early or first not in {-1, due}):
                    raise MissedError(f"the ranks were faster than the round from {round_.number}")
                first = due
                chosen = [slot for slot in kept if slot.step == due]
                copied = self._copy(aim.launch, chosen) if chosen else None
            if copied is not None:
                return copied
            time.sleep(LOOK_S)
        raise ConnectionAbortedError("another round begins")

    def _copy(self, launch: int, slots: Sequence[Slot]) -> NodeCopy | None:
        size, free = sum(len(slot.data) for slot in slots), limits.free_memory()
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

    def _send(self, aim: Aim, copied: NodeCopy, keep: int, is_over: Callable[[], bool]) -> str:
        """Send a step; return why the neighbour does not hold it, or ''."""
        line = self._line = self._line or dial(aim, is_over)
        # The connection may be from an earlier round, which is over.
        line.continue_until(is_over)
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
            # A step that could not be sent is of no use either.
            for own in self._own:
                if own.step != step:
                    own.close()
            self._own = [own for own in self._own if own.step == step]

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def dial(aim: Aim, is_over: Callable[[], bool]) -> Line:
    """Return a connection to the neighbour, which may start later. Raises one of `STRANGE`."""
    give_up = time.monotonic() + DIAL_WAIT_S
    while True:
        try:
            return call(aim.place, {"node": aim.node, "launch": aim.launch}, is_over)
        except OSError:
            if is_over() or time.monotonic() > give_up:
                raise
        time.sleep(DIAL_POLL_S)


class Exchange:
    """Sends this node's snapshots to its neighbour, and keeps those of other nodes."""

    def __init__(
        self,
        find: Find,
        *,
        report: Callable[[Protection], object],
        say: Callable[[str], object],
    ) -> None:
        """`find` returns the slots of a launch. `report` is called from a thread."""
        self.reading = threading.Lock()
        self._say = say
        self._receiver = CopyReceiver(say)
        self._sender = Sender(find, reading=self.reading, report=report)
        self._is_started, self._launch = False, 0

    def begin(self, message: Mapping[str, Any]) -> None:
        """Take the flusher supervisor's message `neighbour`: where a launch's copies go."""
        folder = Path(message["folder"])
        launch, node, holder = (int(message[key]) for key in ("launch", "node", "holder"))
        try:
            self._receiver.listen(
                address_of(folder, node),
                launch,
                ports=handshake.parse_ports(str(message.get("ports", "any"))),
                addresses=message.get("addresses", ()),
            )
        except (OSError, HoldfastError) as error:
            self._say(f"this node keeps no copies for other nodes: {error}")
        place = address_of(folder, holder)
        self._launch = launch
        self._sender.aim(Aim(launch=launch, node=node, holder=holder, place=place))
        if not self._is_started:
            self._is_started = True
            self._sender.start()

    def begin_round(self, message: Mapping[str, Any]) -> None:
        """Take the flusher supervisor's message `copy`: which step all nodes copy next."""
        if int(message["launch"]) == self._launch:
            number, keep = int(message["round"]), int(message["keep"])
            self._sender.begin(Round(number=number, keep=keep))

    def hold(self, launch: int) -> list[int]:
        """Return the steps of which this node has own copies. All copies stay until `forget`."""
        self._receiver.freeze()
        return self._sender.hold(launch)

    def held_for(self, owner: int, launch: int) -> list[int]:
        """Return the steps of another node whose copies here match that node's checksums."""
        return self._receiver.held(owner, launch)

    def own_copy(self, step: int) -> NodeCopy | None:
        return self._sender.copy_of(step)

    def copy_of(self, owner: int, step: int) -> NodeCopy | None:
        return self._receiver.copy_of(owner, step)

    def forget(self) -> None:
        """Free all copies, of this node and of others."""
        self._receiver.forget()
        self._sender.forget()

    def close(self) -> None:
        if self._is_started:
            self._sender.close()
        self._receiver.close()


def address_of(folder: Path, node: int) -> Path:
    """Return the file by which a node's flusher is reached, in a launch's folder."""
    return folder / f"neighbour-{node:04d}.json"
