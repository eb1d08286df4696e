"""Node 0's agent: leads every node through incarnations, a stop or a crash, to the outcome."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator
from typing import Final

from holdfast.contracts.agreement import ROUNDS_MAX, settle
from holdfast.contracts.attempt import IncarnationRecord, Outcome
from holdfast.contracts.board import AT_START, NOWHERE
from holdfast.contracts.channel import ChannelHost
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.history import goes_on_after_numerics, stopped_for_numerics
from holdfast.contracts.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.states import Cause
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.early_save import EarlySave
from holdfast.workers.agent.ended import Ended
from holdfast.workers.agent.hangs import HangWatch
from holdfast.workers.agent.nodes import RemoteNode
from holdfast.workers.agent.notices.notice import Notice
from holdfast.workers.agent.runtime import Node, NodeReport, NodeRuntime, Wreck
from holdfast.workers.agent.signals import SignalBox
from holdfast.workers.agent.spares import SparePlan
from holdfast.workers.agent.stops import StopWatch, StopWish
from holdfast.workers.causes import Ending, RankFailure, hung_ending, on_the_way_out
from holdfast.workers.policy import BUDGETS, Decision, decide_in_place

POLL_S: Final = 0.05
REMOTE_POLL_S: Final = 0.25
# The first node that fails may only be complaining of another; its neighbours get this long.
NEIGHBOUR_WAIT_S: Final = 2.0
SETTLE_TRIES_MAX: Final = 20
SETTLE_PAUSE_S: Final = 0.5
# What is kept of the grace for writing the outcome before the scheduler's KILL.
RESERVE_S: Final = 1.5
CRASH_DRAIN_S: Final = 300.0
# The files of a node that is lost will not come; only what is complete without it is waited for.
LOST_DRAIN_S: Final = 30.0
RESTART_PAUSE_S: Final = 1.0
MIRROR_SLICE_S: Final = 2.0
INCARNATIONS_MAX: Final = 1000


class Lead:
    """One attempt, led. Everything it does is journaled in node 0's journal."""

    def __init__(
        self,
        context: AgentContext,
        signals: SignalBox,
        journal: JournalWriter,
        runtime: NodeRuntime,
        host: ChannelHost | None,
    ) -> None:
        self.context = context
        self.wish: StopWish | None = None
        self.lost: list[str] = []
        self.incarnations: list[IncarnationRecord] = []
        self.last: Ended | None = None
        self.verdict = ""
        self._signals, self._journal, self._runtime = signals, journal, runtime
        self._stops = StopWatch(context, lambda: runtime.step_s)
        self._hangs = HangWatch(context.request, context.attempt, journal)
        self._remotes = [RemoteNode(p) for _, p in sorted(host.peers.items())] if host else []
        self._reports: dict[str, NodeReport] = {}
        self._heard: list[str] = []
        self._noticed: list[tuple[str, Notice]] = []
        self._early = EarlySave(self._note)
        self._spares = SparePlan(context, self._address, self._note)
        self._remote_at = 0.0
        self._serial = 1
        self._tries = 0
        self._settled = False
        self._settle_at = 0.0

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are still there, this one first."""
        return [self._runtime, *(r for r in self._remotes if r.name not in self.lost)]

    def run(self) -> None:
        """Start incarnations until training ends, is stopped, or is not worth another one."""
        for restarts in range(INCARNATIONS_MAX):
            number = self._take_number()
            ended = self._run_incarnation(number)
            self.last = ended
            if ended.ending not in {"crashed", "hung"} or self.wish is not None:
                break
            decision = self._decide(ended, restarts)
            self.verdict = decision.reason
            self._note(f"{decision.action} in place: {decision.reason}")
            if decision.action != "restart":
                break
            self._look_for_stops(self._signals.wait(0.0 if ended.gained else RESTART_PAUSE_S))
            if self.wish is not None:
                break
        self._await_mirror()

    def acknowledge(self, outcome: Outcome) -> None:
        """Tell clouds that announced an end that they may go on, if no step is left to lose."""
        is_safe = outcome.last_step is None or outcome.committed_step == outcome.last_step
        if self.wish is None or self.wish.source != "notice" or not is_safe:
            return
        for node in self.nodes:
            with self._losing(node):
                node.acknowledge()

    def finish(self) -> None:
        """Let the other nodes' agents go."""
        for remote in self._remotes:
            if remote.name not in self.lost:
                with contextlib.suppress(ConnectionError):
                    remote.finish()

    # --- one incarnation --------------------------------------------------------------------

    def _run_incarnation(self, number: int) -> Ended:
        started_at = time.time()
        self._settled, self._tries, self._serial = False, 0, 1
        self._early.forget()
        port = self._spares.take_port(number, self.nodes, self._reports.values())
        address = self._address()
        self._hangs.begin(number)
        self._journal.append(
            EventKind.INCARNATION_STARTED,
            attempt=self.context.attempt.number,
            incarnation=number,
            world_size=self.context.request.world_size,
        )
        for node in reversed(self.nodes):
            with self._losing(node):
                node.start(number, address, port)
        # What a node said last is of the incarnation before, which has ended.
        self._reports.clear()
        self._remote_at = 0.0
        ending = self._watch()
        trained_until = time.time()
        ended = self._end_incarnation(ending)
        self._journal.append(
            EventKind.INCARNATION_ENDED,
            attempt=self.context.attempt.number,
            incarnation=number,
            ending=ended.ending,
            exit_code=ended.exit_code,
            last_step=ended.completed if ended.gained else None,
            trained_until=trained_until,
        )
        self.incarnations.append(ended.record(number, started_at))
        return ended

    def _watch(self) -> str:
        """Wait for the incarnation's end: bounded by the stop's deadline, else by training."""
        while True:
            names = self._signals.wait(POLL_S)
            self._poll_nodes()
            self._look_for_stops(names)
            if self.lost:
                return "crashed"
            codes = [report.exit_code for report in self._reports.values()]
            if any(code not in {None, 0} for code in codes):
                self._wait_for_neighbours()
                return "crashed" if self.wish is None else "stopped"
            if codes and all(code == 0 for code in codes):
                return self._ending_of_leaving()
            if self._is_hung():
                return "hung" if self.wish is None else "killed"
            if self.wish is None:
                reports = self._reports.values()
                self._serial = self._early.pursue(self.nodes, reports, self._serial)
                with contextlib.suppress(ConnectionError):
                    # A node that is gone is found lost at the next look.
                    self._spares.look(self.nodes, reports, len(self.incarnations))
                continue
            self._settle()
            if self._all_have_left():
                # torchrun itself takes seconds to leave, which the grace is too short for.
                return "left"
            if time.time() > self._kill_at(self.wish):
                return "killed"

    def _is_hung(self) -> bool:
        """True when the watch over silent ranks has found, with proof, that they hang."""
        try:
            return self._hangs.look(self.nodes, self._reports)
        except ConnectionError:
            # The node is found lost at the next look, and training ends for that reason.
            return False

    def _all_have_left(self) -> bool:
        """True when every rank of every node has stopped as agreed and is gone."""
        reports = self._reports.values()
        ranks = sum(report.registered for report in reports)
        is_whole = ranks == self.context.request.world_size
        return self._settled and is_whole and all(report.has_left for report in reports)

    def _end_incarnation(self, ending: str) -> Ended:
        """End every node's processes, let the flushers finish, gather what is known."""
        for node in self.nodes:
            with self._losing(node):
                node.kill()
        drain_s = self._drain_s()
        # What lies on the nodes' own disks counts once it is mirrored, so a restart awaits that.
        has_local = bool(self.context.request.checkpoint_local)
        for node in self.nodes:
            with self._losing(node):
                if not node.drain(drain_s, self._lost_numbers(), mirror=has_local):
                    self._note(f"the flusher of {node.name} was not done within {drain_s:.0f} s")
        wrecks = []
        for node in self.nodes:
            self._look_at(node)
            with self._losing(node):
                if ending in {"crashed", "stopped"}:
                    wrecks.append(node.wreck())
        codes = [r.exit_code for r in self._reports.values()]
        exit_code = next((code for code in codes if code), codes[0] if codes else None)
        has_left = ending == "left"
        return Ended(
            ending=self._ending_of_leaving() if has_left else ending,
            exit_code=None if has_left else exit_code,
            reports=tuple(self._reports.values()),
            wreck=Wreck.of_all(wrecks),
            hang=self._hangs.evidence,
        )

    def _ending_of_leaving(self) -> str:
        stopped = any("STOP" in report.phases for report in self._reports.values())
        return "stopped" if stopped else "completed"

    def _poll_nodes(self) -> None:
        """This node's report at every look, the others' a few times a second."""
        self._look_at(self._runtime)
        if time.monotonic() - self._remote_at < REMOTE_POLL_S:
            return
        self._remote_at = time.monotonic()
        for node in self.nodes[1:]:
            self._look_at(node)

    def _look_at(self, node: Node) -> None:
        """Ask a node how it is, and keep in mind what its agent heard."""
        with self._losing(node):
            report = node.report()
            self._reports[node.name] = report
            self._heard += report.signals
            self._noticed += [(node.name, notice) for notice in report.notices]

    def _wait_for_neighbours(self) -> None:
        """After a failure: time for the node that caused it to fail as well."""
        give_up = time.monotonic() + (NEIGHBOUR_WAIT_S if len(self.nodes) > 1 else 0.0)
        while time.monotonic() < give_up:
            time.sleep(POLL_S)
            self._poll_nodes()

    # --- stopping ---------------------------------------------------------------------------

    def _look_for_stops(self, heard: list[str]) -> None:
        """Take up every reason to stop that has come since the last look."""
        now = time.time()
        heard, self._heard = [*heard, *self._heard], []
        for name in heard:
            if self.wish is not None:
                # Signals repeat, and the second of a pair says nothing new.
                continue
            wish, judgement = self._stops.from_signal(name, now)
            if wish is None:
                self._note(f"{name}: a warning of the time limit ({judgement.detail})")
            else:
                self._take_up(wish)
        wishes = [self._stops.from_file(now), self._stops.from_limit(now), *self._notices(now)]
        for wish in wishes:
            if wish is not None:
                self._take_up(wish)

    def _notices(self, now: float) -> list[StopWish]:
        """Journal the notices that have come; the wishes of those that end a node."""
        noticed, self._noticed = self._noticed, []
        for host, notice in noticed:
            self._journal.append(
                EventKind.NOTICE,
                attempt=self.context.attempt.number,
                cloud=notice.cloud,
                notice=notice.wants,
                host=host,
                deadline=notice.deadline,
                detail=notice.detail,
            )
            if notice.wants == "save":
                self._early.ask()
        return [self._stops.from_notice(n, host, now) for host, n in noticed if n.wants == "stop"]

    def _take_up(self, wish: StopWish) -> None:
        if self.wish is not None:
            self.wish = self.wish.hurried_by(wish)
        else:
            self.wish = wish
            self._journal.append(
                EventKind.SIGNAL,
                attempt=self.context.attempt.number,
                source=wish.source,
                name=wish.name,
                cause=wish.cause.value,
                deadline=wish.deadline,
                detail=wish.detail,
            )
        for node in self.nodes:
            with self._losing(node):
                node.announce(self.wish.deadline)

    def _settle(self) -> None:
        """Bring all ranks to one step; tried again, bounded, until it holds."""
        if self._settled or self._tries >= SETTLE_TRIES_MAX or time.monotonic() < self._settle_at:
            return
        if self._early.is_under_way(self._reports.values()):
            return
        self._tries += 1
        began = time.monotonic()
        try:
            step, rounds = settle(self.nodes, first_serial=self._serial)
        except AgreementError as error:
            newest = max((r.completed for r in self._reports.values()), default=NOWHERE)
            self._journal.append(
                EventKind.STOP_FAILED,
                attempt=self.context.attempt.number,
                reason=str(error),
                newest_step=newest,
            )
            self._serial += ROUNDS_MAX
            self._settle_at = time.monotonic() + SETTLE_PAUSE_S
            return
        except ConnectionError:
            # The node is found lost at the next look, and training ends for that reason.
            return
        self._settled = True
        self._journal.append(
            EventKind.STOP_AGREED,
            attempt=self.context.attempt.number,
            step=None if step == AT_START else step,
            rounds=rounds,
            waited_s=round(time.monotonic() - began, 6),
        )

    def _kill_at(self, wish: StopWish) -> float:
        """Unix seconds after which what still runs is ended by force.

        A program that never spoke to the board cannot be stopped with a checkpoint: it gets the
        grace and no more.
        """
        supervision = self.context.request.supervision
        limit_s = supervision.flush_timeout_s
        if not any(report.registered for report in self._reports.values()):
            limit_s = supervision.grace_s
        by_patience = wish.requested_at + limit_s
        return by_patience if wish.deadline is None else min(wish.deadline - RESERVE_S, by_patience)

    def _drain_s(self) -> float:
        """Seconds that the flushers get to finish what is sealed."""
        longest_s = self.context.request.supervision.flush_timeout_s
        if self.lost:
            longest_s = min(longest_s, LOST_DRAIN_S)
        if self.wish is not None and self.wish.deadline is not None:
            return max(1.0, min(self.wish.deadline - time.time(), longest_s))
        return min(CRASH_DRAIN_S, longest_s) if self.wish is None else longest_s

    def _await_mirror(self) -> None:
        """Keep the nodes until what was committed is in the mirror, or the time is up.

        In slices, so that a signal with a deadline is heard meanwhile. How the attempt ended is
        known by then, and such a signal changes nothing of it.
        """
        if not self.context.request.checkpoint_mirror:
            return
        until = time.time() + self.context.request.supervision.flush_timeout_s
        if self.wish is not None and self.wish.deadline is not None:
            until = min(until, self.wish.deadline - RESERVE_S)
        waiting = list(self.nodes)
        while waiting and time.time() < until:
            for node in list(waiting):
                slice_s = max(0.1, min(MIRROR_SLICE_S, until - time.time()))
                with self._losing(node):
                    if node.drain(slice_s, mirror=True):
                        waiting.remove(node)
            waiting = [node for node in waiting if node.name not in self.lost]
            until = min(until, self._deadline_heard() - RESERVE_S)
        if waiting:
            names = ", ".join(node.name for node in waiting)
            self._note(f"not everything of {names} was in the mirror when time was up")

    def _deadline_heard(self) -> float:
        """The earliest deadline, Unix seconds, of what asked for a stop since the last look."""
        now = time.time()
        for node in self.nodes:
            self._look_at(node)
        heard, self._heard = [*self._signals.wait(0.0), *self._heard], []
        wishes = [self._stops.from_signal(name, now)[0] for name in heard]
        wishes += [self._stops.from_file(now), self._stops.from_limit(now), *self._notices(now)]
        deadlines = [w.deadline for w in wishes if w is not None and w.deadline is not None]
        return min(deadlines, default=math.inf)

    # --- helpers ----------------------------------------------------------------------------

    def _decide(self, ended: Ended, restarts: int) -> Decision:
        supervision = self.context.request.supervision
        return decide_in_place(
            self.bad_ending(ended)[0],
            restarts=restarts,
            restarts_max=supervision.restarts_in_place,
            lost_nodes=self.lost,
            gained_steps=ended.gained,
            hangs=sum(one.ending == "hung" for one in self.incarnations),
            hangs_max=supervision.budgets.get(Cause.HANG, BUDGETS[Cause.HANG]),
            rolled_back=goes_on_after_numerics(*self._last_words()),
        )

    def bad_ending(self, ended: Ended) -> tuple[Ending, RankFailure | None]:
        """How the last incarnation ended, which crashed or hung, and the rank that failed first."""
        ending, first = (
            (hung_ending(ended.hang), None) if ended.hang else ended.wreck.classify(self.lost)
        )
        return on_the_way_out(ending, stopped_for_numerics(*self._last_words())), first

    def _last_words(self) -> tuple[list[Event], int, int]:
        """What rank 0 journaled, and the attempt and the incarnation that ended last."""
        attempt = self.context.attempt
        return read_journal(attempt.rank_journal)[0], attempt.number, self.incarnations[-1].number

    def _take_number(self) -> int:
        """The next free incarnation number, taken by exclusive creation of its folder."""
        for number in range(1, INCARNATIONS_MAX + 1):
            folder = self.context.attempt.incarnation(number)
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return number
        raise AgreementError(f"{INCARNATIONS_MAX} incarnations in one attempt: something is wrong")

    def _address(self) -> str:
        """Under which name the ranks of all nodes reach this one."""
        for node in self.nodes[1:]:
            with self._losing(node):
                return node.report().host_address or socket.gethostname()
        return socket.gethostname() if self.context.nodes > 1 else "127.0.0.1"

    @contextlib.contextmanager
    def _losing(self, node: Node) -> Iterator[None]:
        """A node that does not answer is lost, journaled once, and asked nothing more."""
        try:
            yield
        except ConnectionError as error:
            if node.name not in self.lost:
                self.lost.append(node.name)
                self._journal.append(
                    EventKind.NODE_LOST,
                    attempt=self.context.attempt.number,
                    node=getattr(node, "number", 0),
                    host=node.name,
                    detail=str(error),
                )

    def _lost_numbers(self) -> list[int]:
        return [remote.number for remote in self._remotes if remote.name in self.lost]

    def _note(self, text: str) -> None:
        self._journal.append(EventKind.NOTE, attempt=self.context.attempt.number, text=text)
