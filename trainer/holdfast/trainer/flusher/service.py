"""The flusher: one small process per node that writes and commits staged steps.

    python -m holdfast.trainer.flusher --address-fd FD --node I --nodes N
                                       [--supervisor-fd FD] [--run DIR]

It handles bytes and files, not tensors. It outlives the ranks: a step that they sealed is committed
even if all of them are dead. One thread handles messages (`contracts.wire`), another one writes
(`writer`). The flusher polls the slots in shared memory, so a lost message costs a delay and never
a checkpoint.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.node import wire
from holdfast.trainer.flusher import program_files
from holdfast.trainer.flusher.files import Committed, WriteLimit
from holdfast.trainer.flusher.held_slot import HeldSlot
from holdfast.trainer.flusher.hints import Hints, log
from holdfast.trainer.flusher.plan import Departures, FlushPlan, SlotKey, StepGroup, plan
from holdfast.trainer.flusher.salvage import SalvagePlace, find_salvage
from holdfast.trainer.flusher.shards import ShardLists
from holdfast.trainer.flusher.space_guard import Need, SpaceGuard
from holdfast.trainer.flusher.writer import Finished, Writer
from holdfast.trainer.mirror.worker import MirrorWorker
from holdfast.trainer.neighbour.exchange import Exchange, Protection
from holdfast.trainer.slots.slots import DATA_OFFSET, SLOTS_PER_RANK, Slot, SlotState
from holdfast.trainer.staging.allocator import Allocator

# A rank's connection to the flusher, and how the flusher detects the rank's death.


@dataclass
class RankConnection:
    """A connected rank, as its `hello` describes it. `process` is the rank's pidfd, if any."""

    connection: socket.socket
    process: int | None
    rank: int = -1
    local_rank: int = -1
    launch: int = 0
    slots: tuple[SlotKey, ...] = ()


def open_process(connection: socket.socket) -> int | None:
    """Return a descriptor that becomes readable when the peer's process ends, None if unsupported.

    Its forked children keep its socket open, so the socket alone may report the end too late.
    """
    try:
        return os.pidfd_open(wire.peer_of(connection)[0])
    except OSError:
        return None


TICK_S: Final = 0.1
SUPERVISOR_SEND_TIMEOUT_S: Final = 5.0
RANK_SEND_TIMEOUT_S: Final = 5.0
IDLE_S: Final = 60.0
LINGER_S: Final = 5.0
# torchrun gives the ranks of a failed program 30 s before it kills them.
SNAPSHOT_LINGER_S: Final = 60.0
# After the supervisor and the ranks are gone: the longest wait for copies to the mirror.
MIRROR_LINGER_S: Final = 1800.0
RESULTS_MAX: Final = 200
ERROR_BYTES_MAX: Final = 500


class Flusher:
    """Holds the slots of one node's ranks, and writes and commits each complete step."""

    def __init__(
        self,
        listener: socket.socket,
        supervisor: socket.socket | None,
        budget: int | None,
        mirror: MirrorWorker,
        hints: Hints,
        write_limit: int | None = None,
    ) -> None:
        """`budget` is the byte limit for all checkpoints of the run.

        `write_limit` is the most bytes per second that are written while ranks train.
        """
        self._hints = hints
        self._limit = WriteLimit(write_limit, self._is_waited_for)
        self._mirror = mirror
        self._supervisor = supervisor
        self._space_guard = SpaceGuard(budget, self._ask_for_space)
        self._was_supervised = supervisor is not None
        self._supervisor_process: int | None = None
        self._peers: list[RankConnection] = []
        self._held: dict[SlotKey, HeldSlot] = {}
        self._gone: set[tuple[int, int]] = set()
        # Ranks that closed their sessions, the places of launches by their ranks' plans, and the
        # launch that this node has salvaged.
        self._left: set[tuple[int, int]] = set()
        self._places: dict[int, SalvagePlace] = {}
        self._salvaged, self._is_salvaging = 0, False
        self._newest_launch = 0
        self._busy: set[SlotKey] = set()
        self._committed_steps: dict[int, int] = {}
        self._results: deque[Finished] = deque(maxlen=RESULTS_MAX)
        self._drain_by: float | None = None
        self._lost_nodes: frozenset[int] = frozenset()
        self._drains_mirror = False
        self._drain_number: int | None = None
        self._alone_since = time.monotonic()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._watch(listener, lambda: self._accept(listener))
        self._watch(self._wake_reader, lambda: self._wake_reader.recv(4096))
        if supervisor is not None:
            supervisor.settimeout(SUPERVISOR_SEND_TIMEOUT_S)
            self._watch(supervisor, self._receive_from_supervisor)
            self._supervisor_process = open_process(supervisor)
            if self._supervisor_process is not None:
                self._watch(self._supervisor_process, self._lose_supervisor)
        self._allocator = Allocator()
        self._shards = ShardLists()
        self._exchange = Exchange(self._slots_of, report=self._report_protection, say=log)
        self._writer = Writer(
            self._held,
            mirror,
            self._space_guard,
            self._limit,
            newest_launch=lambda: self._newest_launch,
            lost_nodes=lambda: self._lost_nodes,
            wake=lambda: self._wake_writer.send(b"\0"),
            report=lambda: self._notify_supervisor("wrote"),
            hints=hints,
            exchange=self._exchange,
        )

    def run(self) -> None:
        """Serve until the supervisor has hung up and all sealed steps are written."""
        self._writer.start()
        while not self._is_over():
            for key, _ in self._selector.select(TICK_S):
                key.data()
            self._report_finished()
            self._dispatch()
            self._salvage()
            self._release_orphans()
            self._answer_drain()
        self._writer.put(None)
        self._allocator.stop()
        self._exchange.close()

    # --- messages -------------------------------------------------------------------------

    def _watch(self, source: socket.socket | int, act: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        # Slots hold the whole state of a run. A process of another user gets none of them.
        if not wire.is_same_user(connection):
            connection.close()
            return
        connection.settimeout(RANK_SEND_TIMEOUT_S)
        peer = RankConnection(connection, open_process(connection))
        self._peers.append(peer)
        self._watch(connection, lambda: self._receive_from_rank(peer))
        if peer.process is not None:
            self._watch(peer.process, lambda: self._hang_up(peer))

    def _receive_from_rank(self, peer: RankConnection) -> None:
        try:
            received = wire.receive(peer.connection)
            if received is None:
                self._hang_up(peer)
                return
            message, descriptors = received
            # Ranks have no descriptors to give. Open ones would leak.
            for descriptor in descriptors:
                os.close(descriptor)
            self._answer_rank(peer, message)
        except (OSError, ValueError, KeyError) as error:
            # An invalid message from one rank must not harm the checkpoints of the others. The
            # rank may still use its slots, so they stay as they are, and it may connect again.
            log(f"rank {peer.rank} was disconnected: {type(error).__name__}: {error}")
            self._drop(peer)

    def _answer_rank(self, peer: RankConnection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "hello":
            peer.rank, peer.local_rank = message["rank"], message["local_rank"]
            peer.launch = message["launch"]
            self._newest_launch = max(self._newest_launch, peer.launch)
            self._hints.give()
            # The rank is there after all, for example after a flusher restarted.
            self._gone.discard((peer.launch, peer.local_rank))
            peer.slots = tuple(k for k in self._held if k[:2] == (peer.launch, peer.rank))
            for key in peer.slots:
                self._held[key].local_rank = peer.local_rank
                self._held[key].is_orphan = False
            wire.send(peer.connection, "welcome")
        elif kind == "slots":
            self._give_slots(peer, message)
        elif kind == "release":
            self._release(peer, of_program=bool(message.get("of_program")))
        elif kind == "hurry":
            self._limit.lift(peer.launch, int(message["step"]))
        elif kind == "leaves":
            self._left.add((peer.launch, peer.local_rank))
            wire.send(peer.connection, "left")
        elif kind == "writes":
            if "nodes" in message:
                folder, node, nodes = (message[key] for key in ("folder", "node", "nodes"))
                self._places = {peer.launch: SalvagePlace(Path(folder), node, nodes)}
            if shards := self._shards.hear(peer.rank, message):
                self._writer.put(shards)

    def _give_slots(self, peer: RankConnection, message: dict[str, Any]) -> None:
        """Give a rank new slots. Its earlier ones of this kind are released once written."""
        of_program = bool(message.get("of_program"))
        former = [key for key in peer.slots if program_files.is_of_program(key) == of_program]
        for key in former:
            self._held[key].is_orphan = True
        count, directory = int(message.get("count", SLOTS_PER_RANK)), message.get("directory", "")
        keys = program_files.new_keys(
            self._held, peer.launch, peer.rank, of_program=of_program, count=count
        )
        try:
            made = self._create_slots(count, int(message["bytes"]), directory)
        except OSError as error:
            # A full disk fails what the rank wants to save, and nothing that it saved before.
            wire.send(peer.connection, "slots", numbers=[], problem=str(error.strerror))
            return
        for key, handle in zip(keys, made, strict=True):
            self._held[key] = HeldSlot(handle, Slot(handle), peer.local_rank)
            # The supervisor keeps a copy of the descriptor, so the slot survives this process as
            # well, see decision 2.
            self._notify_supervisor("keep", (handle,), launch=key[0], rank=key[1], slot=key[2])
        peer.slots = (*(key for key in peer.slots if key not in former), *keys)
        wire.send(peer.connection, "slots", descriptors=tuple(made), numbers=[k[2] for k in keys])
        if not directory:
            slots = [self._held[key].slot for key in keys]
            self._allocator.begin(slots, int(message.get("used_bytes", 0)))

    def _create_slots(self, count: int, data_bytes: int, directory: str) -> list[int]:
        """Return the descriptors of new slots. Raises `OSError` and leaves none if one fails."""
        made: list[int] = []
        try:
            for _ in range(count):
                made.append(Slot.create(data_bytes, directory))
        except OSError:
            for handle in made:
                os.close(handle)
            raise
        return made

    def _release(self, peer: RankConnection, *, of_program: bool) -> None:
        """Free a rank's slots, and report how many are still in use for a moment."""
        self._report_finished()
        kind = {key for key in peer.slots if program_files.is_of_program(key) == of_program}
        for key in kind:
            self._held[key].is_orphan = True
        self._release_orphans()
        wire.send(peer.connection, "released", left=len(kind & self._held.keys()))

    def _hang_up(self, peer: RankConnection) -> None:
        """Handle the end of a rank: its sealed slots stay, its unsealed ones are released."""
        if peer not in self._peers:
            return
        self._drop(peer)
        who = (peer.launch, peer.rank)
        # The rank may have two connections while it reconnects. It is gone when the last one ends.
        if peer.rank < 0 or any((o.launch, o.rank) == who for o in self._peers):
            return
        self._gone.add((peer.launch, peer.local_rank))
        for key in peer.slots:
            self._held[key].is_orphan = True

    def _drop(self, peer: RankConnection) -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.process is not None:
            self._selector.unregister(peer.process)
            os.close(peer.process)

    def _receive_from_supervisor(self) -> None:
        assert self._supervisor is not None
        try:
            received = wire.receive(self._supervisor)
        except (OSError, ValueError) as error:
            log(f"the supervisor was disconnected: {error}")
            received = None
        if received is None:
            self._lose_supervisor()
            return
        message, descriptors = received
        if message["kind"] == "kept":
            for handle in descriptors:
                self._adopt((message["launch"], message["rank"], message["slot"]), handle)
        elif message["kind"] == "room":
            self._space_guard.hear(message)
        elif message["kind"] == "neighbour":
            self._exchange.begin(message)
        elif message["kind"] == "copy":
            self._exchange.begin_round(message)
        elif message["kind"] == "drain":
            # Reports of losses add up: a node that was lost once stays lost in this launch.
            self._lost_nodes |= frozenset(map(int, message.get("lost", ())))
            self._drain_by = time.monotonic() + float(message["timeout_s"])
            self._drain_number = message.get("number")
            self._drains_mirror = bool(message.get("mirror"))
            self._hints.hurry(True)

    def _lose_supervisor(self) -> None:
        """Continue without the supervisor, which has hung up or ended."""
        if self._supervisor is None:
            return
        self._selector.unregister(self._supervisor)
        self._supervisor.close()
        self._supervisor = None
        if self._supervisor_process is not None:
            self._selector.unregister(self._supervisor_process)
            os.close(self._supervisor_process)
            self._supervisor_process = None
        self._space_guard.hang_up()
        self._hints.end()

    def _adopt(self, key: SlotKey, handle: int) -> None:
        """Take over a slot that an earlier flusher held."""
        if key in self._held or os.fstat(handle).st_size <= DATA_OFFSET:
            os.close(handle)
            return
        slot = Slot(handle)
        resumed = slot.state is SlotState.FLUSHING
        # The former flusher died while it wrote this slot. The bytes are still in memory, so the
        # step is written again.
        if resumed:
            slot.state = SlotState.SEALED
        self._held[key] = HeldSlot(handle, slot, resumed=resumed)

    def _notify_supervisor(self, kind: str, descriptors: tuple[int, ...] = (), **data: Any) -> None:
        if self._supervisor is None:
            return
        try:
            wire.send(self._supervisor, kind, descriptors=descriptors, **data)
        except (OSError, ValueError) as error:
            log(f"cannot send `{kind}` to the supervisor: {error}")

    def _slots_of(self, launch: int) -> list[Slot]:
        """Return the slots of a launch, for the thread that sends copies of snapshots."""
        return [
            held.slot
            for key, held in list(self._held.items())
            if key[0] == launch and not program_files.is_of_program(key)
        ]

    def _report_protection(self, found: Protection) -> None:
        """Tell the supervisor, from the thread that sends copies, what the neighbour holds."""
        if found.problem and not found.is_missed:
            log(f"node {found.holder} holds no newer copy: {found.problem}")
        problem = wire.clip(found.problem, ERROR_BYTES_MAX)
        self._notify_supervisor(
            "protected",
            launch=found.launch,
            holder=found.holder,
            round=found.round,
            step=found.step,
            problem=problem,
            is_missed=found.is_missed,
        )

    def _ask_for_space(self, need: Need, problem: str) -> bool:
        """Ask the supervisor for space, from the writer thread. Packets are sent whole or not."""
        error = wire.clip(problem, wire.MESSAGE_BYTES_MAX // 2)
        self._notify_supervisor("full", step=need.step, bytes=need.step_bytes, error=error)
        return self._supervisor is not None

    # --- decisions ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand complete steps to the writer; give up those that will never be complete."""
        found = self._plan()
        # After the steps were read, and queued before them. So a file that was sealed before a
        # step is written before it, see decision 80.
        for file in program_files.take_sealed(self._held):
            self._writer.put(file)
        for group in found.ready:
            self._hand_over(group, None)
        if not found.dead:
            return
        # A rank may have sealed a slot while the slots were read one after the other. Give up
        # only steps that a second plan gives up too.
        confirmed = {group for group, _ in self._plan().dead}
        for group, reason in found.dead:
            if group in confirmed:
                self._hand_over(group, reason)

    def _hand_over(self, group: StepGroup, given_up: str | None) -> None:
        for key in group.slots:
            # Marked before it is queued, so that the next look does not queue it again.
            self._held[key].slot.state = SlotState.FLUSHING
        self._busy.update(group.slots)
        self._writer.put((group, given_up))

    def _plan(self) -> FlushPlan:
        departures = Departures(frozenset(self._gone), self._newest_launch)
        views = [self._held[key].view(key) for key in self._step_keys if key not in self._busy]
        return plan(views, departures)

    @property
    def _step_keys(self) -> list[SlotKey]:
        return [key for key in self._held if not program_files.is_of_program(key)]

    def _salvage(self) -> None:
        """Queue the salvage of dead ranks' snapshots once all sealed steps are written."""
        launches = self._snapshots() | self._launches_to_list()
        # A sealed step may be newer than any snapshot, so those are written first.
        if not launches or self._busy or self._writer.finished or self._plan().ready:
            return
        for launch in launches:
            # A living rank may overwrite its snapshot at any moment, see decision 9.
            if launch < self._newest_launch or not self._is_deserted(launch):
                continue
            views = [
                self._held[key].view(key, is_deserted=True)
                for key in self._step_keys
                if key[0] == launch
            ]
            committed = self._committed_steps.get(launch, -1)
            found = find_salvage(views, launch, committed)
            if not found.slots:
                slots = tuple(view.key for view in views)
                found = replace(found, slots=slots, place=self._places[launch])
            self._salvaged, self._is_salvaging = launch, True
            self._busy.update(found.slots)
            self._writer.put(found)

    def _launches_to_list(self) -> set[int]:
        """Return the launch of several nodes that crashed here, until it is salvaged.

        The other nodes wait for this node's list, also if it has no snapshot: its ranks may have
        died in the first copy of a launch, or in one into their only slot.
        """
        crashed = {launch for launch, _ in self._gone - self._left}
        return {one for one in crashed & self._places.keys() if one > self._salvaged}

    def _snapshots(self) -> set[int]:
        """Return the launches that have snapshots in memory."""
        return {key[0] for key, held in self._held.items() if held.slot.state is SlotState.SNAPSHOT}

    def _is_deserted(self, launch: int) -> bool:
        """Return True if this node has no rank of the launch, so its snapshots cannot change."""
        if any(peer.launch == launch for peer in self._peers):
            return False
        is_ended = self._drain_by is not None or (self._was_supervised and self._supervisor is None)
        return is_ended or any(who[0] == launch for who in self._gone)

    def _is_waited_for(self, launch: int) -> bool:
        """Return True if no rank of a launch trains here, or the supervisor waits. Any thread."""
        return self._drain_by is not None or all(p.launch != launch for p in list(self._peers))

    def _report_finished(self) -> None:
        while self._writer.finished:
            result = self._writer.finished.popleft()
            self._busy.difference_update(result.group.slots)
            self._is_salvaging = self._is_salvaging and not result.is_salvaged
            if result.is_nothing:
                continue
            self._results.append(result)
            step, name = result.group.step, result.group.checkpoint
            if result.committed is not None:
                self._report_commit(result, result.committed)
            else:
                log(f"{name} is not committed: {result.error}")
                error = wire.clip(result.error, wire.MESSAGE_BYTES_MAX // 2)
                self._notify_supervisor("failed", step=step, checkpoint=name, error=error)

    def _report_commit(self, result: Finished, done: Committed) -> None:
        launch = result.group.launch
        self._committed_steps[launch] = max(done.step, self._committed_steps.get(launch, -1))
        self._notify_supervisor(
            "committed",
            step=done.step,
            checkpoint=done.checkpoint,
            bytes=done.bytes,
            flush_s=done.flush_s,
            is_salvaged=result.is_salvaged,
        )

    def _answer_drain(self) -> None:
        """Answer the supervisor's drain request when all is written or its time limit passed."""
        if self._drain_by is None or self._writer.finished:
            return
        unmirrored = self._mirror.unfinished if self._drains_mirror else []
        idle = not self._has_work() and not self._snapshots()
        # The time limit counts even if work is left: node 0 must write the outcome before the job
        # ends.
        if not (idle and not unmirrored) and time.monotonic() < self._drain_by:
            return
        self._drain_by = None
        self._hints.hurry(False)
        failed = [
            {"step": r.group.step, "error": wire.clip(r.error, ERROR_BYTES_MAX)}
            for r in self._results
            if not r.committed
        ]
        self._notify_supervisor(
            "drained",
            number=self._drain_number,
            is_done=idle,
            committed=[r.group.step for r in self._results if r.committed],
            failed=wire.newest_that_fit(failed, wire.MESSAGE_BYTES_MAX // 3),
            unmirrored=wire.newest_that_fit(unmirrored, wire.MESSAGE_BYTES_MAX // 3),
        )
        self._results.clear()

    def _release_orphans(self) -> None:
        """Free the memory of slots that no rank will fill again."""
        for key, held in list(self._held.items()):
            is_old = held.is_orphan or key[0] < self._newest_launch
            kept = held.slot.state in {SlotState.SEALED, SlotState.FLUSHING}
            if held.slot.state is SlotState.SNAPSHOT:
                # A later launch began without these snapshots, so they are of no use.
                kept = key[0] >= self._newest_launch
            if not is_old or kept or key in self._busy:
                continue
            if not self._exchange.reading.acquire(blocking=False):
                # Its bytes are being copied for the neighbour.
                continue
            try:
                self._held.pop(key).free()
            finally:
                self._exchange.reading.release()
            for peer in self._peers:
                peer.slots = tuple(k for k in peer.slots if k != key)

    def _has_work(self) -> bool:
        """Return True while something is sealed or being written."""
        is_busy = bool(self._busy) or self._is_salvaging
        return bool(is_busy or self._plan().ready or program_files.are_pending(self._held))

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._supervisor is not None or self._writer.finished or self._has_work():
            self._alone_since = now
            return False
        if not self._was_supervised:
            if self._peers:
                self._alone_since = now
            return now - self._alone_since > IDLE_S
        linger_s = SNAPSHOT_LINGER_S if self._snapshots() else LINGER_S
        if self._mirror.unfinished:
            # Copies to the mirror continue without ranks, but not for ever.
            linger_s = MIRROR_LINGER_S
        elif not self._peers:
            return True
        return now - self._alone_since > linger_s
