"""Node 0's agent: leads every node through launches, a stop or a crash, to the outcome."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from holdfast.contracts.agreement import ROUNDS_MAX, agree_on_step
from holdfast.contracts.attempt import LaunchRecord, Outcome
from holdfast.contracts.channel import ChannelHost
from holdfast.contracts.errors import AgreementError
from holdfast.contracts.history import goes_on_after_numerics, stopped_for_numerics
from holdfast.contracts.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.rank_status import AT_START, NOWHERE
from holdfast.contracts.states import Cause
from holdfast.workers.agent.context import LAUNCHES_MAX, AgentContext, take_number
from holdfast.workers.agent.crew import AGREE_WAIT_S, Crew, any_silent, await_result
from holdfast.workers.agent.drains import drain_all
from holdfast.workers.agent.early_save import EarlySave
from holdfast.workers.agent.ended import Ended
from holdfast.workers.agent.hangs import HangWatch
from holdfast.workers.agent.listener import StopListener
from holdfast.workers.agent.nodes import RemoteNode
from holdfast.workers.agent.notices.notice import Notice
from holdfast.workers.agent.runtime import CrashReport, Node, NodeReport, NodeRuntime
from holdfast.workers.agent.signals import SignalBox
from holdfast.workers.agent.standby_plan import StandbyPlan
from holdfast.workers.agent.stops import StopRequest, StopWatch
from holdfast.workers.causes import Ending, RankFailure, hung_ending, on_the_way_out
from holdfast.workers.policy import BUDGETS, Decision, decide_in_place

POLL_S: Final = 0.05
REMOTE_POLL_S: Final = 0.25
# The first node that fails may only be complaining of another; its neighbours get this long.
NEIGHBOUR_WAIT_S: Final = 2.0
AGREE_TRIES_MAX: Final = 20
AGREE_PAUSE_S: Final = 0.5
# What is kept of the grace for writing the outcome before the scheduler's KILL.
RESERVE_S: Final = 1.5
CRASH_DRAIN_S: Final = 300.0
# The files of a node that is lost will not come; only what is complete without it is waited for.
LOST_DRAIN_S: Final = 30.0
RESTART_PAUSE_S: Final = 1.0
ANSWER_S_MIN: Final = 0.5

T = TypeVar("T")


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
        self.lost: list[str] = []
        self.launches: list[LaunchRecord] = []
        self.last: Ended | None = None
        self.verdict = ""
        self._journal, self._runtime, self._host = journal, runtime, host
        self._stops = StopWatch(context, lambda: runtime.step_s)
        self._listener = StopListener(context, signals, self._stops)
        self._crew = Crew(context.nodes)
        self._announced: StopRequest | None = None
        self._hangs = HangWatch(context.request, context.attempt, journal)
        self._remotes: list[RemoteNode] = []
        self._reports: dict[str, NodeReport] = {}
        self._asked: dict[str, Future[NodeReport]] = {}
        self._noticed: list[tuple[str, Notice]] = []
        self._early = EarlySave(self._note, self._crew.agree)
        self._standby_plan = StandbyPlan(context, self._address, self._note)
        self._remote_at = 0.0
        self._serial = 1
        self._tries = 0
        self._has_agreed = False
        self._agree_at = 0.0

    @property
    def stop_request(self) -> StopRequest | None:
        """Why the attempt is to stop, once something has asked for it."""
        return self._listener.stop_request

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are still there, this one first."""
        return [self._runtime, *(r for r in self._remotes if r.name not in self.lost)]

    def run(self) -> None:
        """Start launches until training ends, is stopped, or is not worth another one.

        Raises `AgreementError` when a node does not join.
        """
        self._gather()
        if self.stop_request is not None:
            return
        for restarts in range(LAUNCHES_MAX):
            number = take_number(self.context.attempt)
            ended = self._run_launch(number)
            self.last = ended
            if ended.ending not in {"crashed", "hung"} or self.stop_request is not None:
                break
            decision = self._decide(ended, restarts)
            self.verdict = decision.reason
            self._note(f"{decision.action} in place: {decision.reason}")
            if decision.action != "restart":
                break
            self._listener.wait(0.0 if ended.gained else RESTART_PAUSE_S)
            if self.stop_request is not None:
                break
        self._listener.end()
        self._await_mirror()

    def _gather(self) -> None:
        """Wait for the other nodes, unless a stop is asked for meanwhile."""
        if self._host is None:
            return
        timeout_s = self.context.request.supervision.join_timeout_s
        self._host.wait_for_peers(timeout_s, is_over=lambda: self.stop_request is not None)
        peers = sorted(self._host.peers.items())
        self._remotes = [RemoteNode(peer, self._crew.post) for _, peer in peers]

    def acknowledge(self, outcome: Outcome) -> None:
        """Tell clouds that announced an end that they may go on, if no step is left to lose."""
        is_safe = outcome.last_step is None or outcome.committed_step == outcome.last_step
        if self.stop_request is None or self.stop_request.source != "notice" or not is_safe:
            return
        self._ask_all(lambda node: node.acknowledge())

    def finish(self) -> None:
        """Let the other nodes' agents go."""
        there = [remote for remote in self._remotes if remote.name not in self.lost]
        for going in [self._crew.begin(RemoteNode.finish, remote) for remote in there]:
            with contextlib.suppress(ConnectionError):
                await_result(going, self._give_up_at())

    def close(self) -> None:
        """Hear and ask nothing more."""
        self._listener.close()
        self._crew.close()

    # --- one launch --------------------------------------------------------------------

    def _run_launch(self, number: int) -> Ended:
        started_at = time.time()
        self._has_agreed, self._tries, self._serial = False, 0, 1
        self._early.forget()
        port = self._standby_plan.take_port(number, self.nodes, self._reports.values())
        address = self._address()
        self._hangs.begin(number)
        self._journal.append(
            EventKind.LAUNCH_STARTED,
            attempt=self.context.attempt.number,
            launch=number,
            world_size=self.context.request.world_size,
        )
        self._ask_all(lambda node: node.start(number, address, port))
        # What a node said last is of the launch before, which has ended.
        self._reports.clear()
        self._remote_at = 0.0
        ending = self._watch()
        trained_until = time.time()
        ended = self._end_launch(ending)
        self._journal.append(
            EventKind.LAUNCH_ENDED,
            attempt=self.context.attempt.number,
            launch=number,
            ending=ended.ending,
            exit_code=ended.exit_code,
            last_step=ended.completed if ended.gained else None,
            trained_until=trained_until,
        )
        self.launches.append(ended.record(number, started_at))
        return ended

    def _watch(self) -> str:
        """Wait for the launch's end: bounded by the stop's deadline, else by training."""
        while True:
            self._listener.wait(POLL_S)
            self._poll_nodes()
            self._take_up_notices()
            self._announce()
            if self.lost:
                return "crashed"
            codes = [report.exit_code for report in self._reports.values()]
            if any(code not in {None, 0} for code in codes):
                self._wait_for_neighbours()
                return "crashed" if self.stop_request is None else "stopped"
            # Not every node may have reported yet.
            is_whole = len(self._reports) == len(self.nodes)
            if is_whole and all(code == 0 for code in codes):
                return self._ending_of_leaving()
            if is_whole and self._is_hung():
                return "hung" if self.stop_request is None else "killed"
            if (stop_request := self.stop_request) is None:
                reports = self._reports.values()
                if not is_whole or any_silent(self.nodes):
                    continue
                self._serial = self._early.pursue(self.nodes, reports, self._serial)
                with contextlib.suppress(ConnectionError):
                    # A node that is gone is found lost at the next look.
                    self._standby_plan.look(self.nodes, reports, len(self.launches))
                continue
            self._agree(stop_request)
            if self._all_have_left():
                # torchrun itself takes seconds to leave, which the grace is too short for.
                return "left"
            if time.time() > self._kill_at(stop_request):
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
        return self._has_agreed and is_whole and all(report.has_left for report in reports)

    def _end_launch(self, ending: str) -> Ended:
        """End every node's processes, let the flushers finish, gather what is known."""
        self._collect_reports()
        self._ask_all(lambda node: node.kill())
        began = time.time()
        until = partial(self._drain_until, began)
        # What lies on the nodes' own disks counts once it is mirrored, so a restart awaits that.
        has_local = bool(self.context.request.checkpoint_local)
        for name in drain_all(self._ask_all, self._lost_numbers, until, mirror=has_local):
            spent_s = time.time() - began
            self._note(f"the flusher of {name} was not done within {spent_s:.0f} s")
        for node, report in self._ask_all(lambda node: node.report()):
            self._take(node, report)
        crash_reports = []
        if ending in {"crashed", "stopped"}:
            crash_reports = [one for _, one in self._ask_all(lambda node: node.crash_report())]
        codes = [r.exit_code for r in self._reports.values()]
        exit_code = next((code for code in codes if code), codes[0] if codes else None)
        has_left = ending == "left"
        return Ended(
            ending=self._ending_of_leaving() if has_left else ending,
            exit_code=None if has_left else exit_code,
            reports=tuple(self._reports.values()),
            crash_report=CrashReport.of_all(crash_reports),
            hang=self._hangs.evidence,
        )

    def _ending_of_leaving(self) -> str:
        stopped = any("STOP" in report.phases for report in self._reports.values())
        return "stopped" if stopped else "completed"

    def _poll_nodes(self) -> None:
        """This node's report at every look, the others' a few times a second; waits for none."""
        self._take(self._runtime, self._runtime.report())
        for node in self.nodes[1:]:
            asked = self._asked.get(node.name)
            if asked is not None and asked.done():
                del self._asked[node.name]
                with self._losing(node):
                    self._take(node, asked.result())
        if time.monotonic() - self._remote_at < REMOTE_POLL_S:
            return
        self._remote_at = time.monotonic()
        for node in self.nodes[1:]:
            if node.name not in self._asked:
                self._asked[node.name] = self._crew.begin(lambda one: one.report(), node)

    def _collect_reports(self) -> None:
        """Wait for the reports that were asked for: they have what the nodes' agents heard."""
        for node in self.nodes[1:]:
            asked = self._asked.pop(node.name, None)
            if asked is not None:
                with self._losing(node):
                    self._take(node, await_result(asked, self._give_up_at()))

    def _take(self, node: Node, report: NodeReport) -> None:
        """Keep in mind how a node is, and what its agent heard."""
        self._reports[node.name] = report
        for name in report.signals:
            self._listener.hear(name)
        self._noticed += [(node.name, notice) for notice in report.notices]

    def _wait_for_neighbours(self) -> None:
        """After a failure: time for the node that caused it to fail as well."""
        give_up = time.monotonic() + (NEIGHBOUR_WAIT_S if len(self.nodes) > 1 else 0.0)
        while time.monotonic() < give_up:
            time.sleep(POLL_S)
            self._poll_nodes()

    # --- stopping ---------------------------------------------------------------------------

    def _take_up_notices(self) -> None:
        """What clouds have announced since the last look."""
        for stop_request in self._notices(time.time()):
            self._listener.take_up(stop_request)

    def _announce(self) -> None:
        """Tell the nodes' ranks that a stop is wanted, and by when, if that is new."""
        stop_request = self.stop_request
        if stop_request is None or stop_request == self._announced:
            return
        self._announced = stop_request
        for node in self.nodes:
            with self._losing(node):
                node.announce(stop_request.deadline)

    def _notices(self, now: float) -> list[StopRequest]:
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

    def _agree_s(self, stop_request: StopRequest) -> float:
        """Seconds that nodes get to answer in: a part of what is left, for there are others."""
        left_s = self._kill_at(stop_request) - time.time()
        return max(ANSWER_S_MIN, min(AGREE_WAIT_S, left_s / 4))

    def _agree(self, stop_request: StopRequest) -> None:
        """Bring all ranks to one step; tried again, bounded, until it holds."""
        if self._has_agreed or self._tries >= AGREE_TRIES_MAX or time.monotonic() < self._agree_at:
            return
        if self._early.is_under_way(self._reports.values()) or any_silent(self.nodes):
            return
        self._tries += 1
        began = time.monotonic()
        try:
            ask_all = partial(self._crew.agree, wait_s=self._agree_s(stop_request))
            step, rounds = agree_on_step(self.nodes, first_serial=self._serial, ask_all=ask_all)
        except AgreementError as error:
            newest = max((r.completed for r in self._reports.values()), default=NOWHERE)
            self._journal.append(
                EventKind.STOP_FAILED,
                attempt=self.context.attempt.number,
                reason=str(error),
                newest_step=newest,
            )
            self._serial += ROUNDS_MAX
            self._agree_at = time.monotonic() + AGREE_PAUSE_S
            return
        except ConnectionError:
            # The node is found lost at the next look, and training ends for that reason.
            return
        self._has_agreed = True
        self._journal.append(
            EventKind.STOP_AGREED,
            attempt=self.context.attempt.number,
            step=None if step == AT_START else step,
            rounds=rounds,
            waited_s=round(time.monotonic() - began, 6),
        )

    def _kill_at(self, stop_request: StopRequest) -> float:
        """Unix seconds after which what still runs is ended by force.

        A program that never spoke to the status table cannot be stopped with a checkpoint: it gets
        the grace and no more.
        """
        supervision = self.context.request.supervision
        limit_s = supervision.flush_timeout_s
        if not any(report.registered for report in self._reports.values()):
            limit_s = supervision.grace_s
        kill_at, deadline = stop_request.requested_at + limit_s, stop_request.deadline
        return kill_at if deadline is None else min(deadline - RESERVE_S, kill_at)

    def _drain_until(self, began: float) -> float:
        """Unix seconds at which flushers that finish since `began` are waited for no longer."""
        longest_s = self.context.request.supervision.flush_timeout_s
        if self.lost:
            longest_s = min(longest_s, LOST_DRAIN_S)
        stop_request = self.stop_request
        if stop_request is not None and stop_request.deadline is not None:
            return max(began + 1.0, min(stop_request.deadline, began + longest_s))
        return began + (min(CRASH_DRAIN_S, longest_s) if stop_request is None else longest_s)

    def _await_mirror(self) -> None:
        """Keep the nodes until what was committed is in the mirror, or the time is up."""
        if not self.context.request.checkpoint_mirror:
            return
        until = time.time() + self.context.request.supervision.flush_timeout_s
        if self.stop_request is not None and self.stop_request.deadline is not None:
            until = min(until, self.stop_request.deadline - RESERVE_S)

        def end() -> float:
            for node, report in self._ask_all(lambda node: node.report()):
                self._take(node, report)
            self._take_up_notices()
            return min(until, self._listener.late_deadline - RESERVE_S)

        if late := drain_all(self._ask_all, self._lost_numbers, end, mirror=True):
            self._note(f"not everything of {', '.join(late)} was in the mirror when time was up")

    # --- helpers ----------------------------------------------------------------------------

    def _decide(self, ended: Ended, restarts: int) -> Decision:
        supervision = self.context.request.supervision
        return decide_in_place(
            self.bad_ending(ended)[0],
            restarts=restarts,
            restarts_max=supervision.restarts_in_place,
            lost_nodes=self.lost,
            gained_steps=ended.gained,
            hangs=sum(one.ending == "hung" for one in self.launches),
            hangs_max=supervision.budgets.get(Cause.HANG, BUDGETS[Cause.HANG]),
            rolled_back=goes_on_after_numerics(*self._last_words()),
        )

    def bad_ending(self, ended: Ended) -> tuple[Ending, RankFailure | None]:
        """How the last launch ended, which crashed or hung, and the rank that failed first."""
        crash = ended.crash_report
        ending, first = (hung_ending(ended.hang), None) if ended.hang else crash.classify(self.lost)
        return on_the_way_out(ending, stopped_for_numerics(*self._last_words())), first

    def _last_words(self) -> tuple[list[Event], int, int]:
        """What rank 0 journaled, and the attempt and the launch that ended last."""
        attempt = self.context.attempt
        return read_journal(attempt.rank_journal)[0], attempt.number, self.launches[-1].number

    def _address(self) -> str:
        """Under which name the ranks of all nodes reach this one."""
        if self.context.nodes == 1:
            return "127.0.0.1"
        for node in self.nodes[1:]:
            if node.name not in self._reports:
                with self._losing(node):
                    asked = self._crew.begin(lambda one: one.report(), node)
                    self._take(node, await_result(asked, self._give_up_at()))
            if node.name in self._reports:
                return self._reports[node.name].host_address or socket.gethostname()
        return socket.gethostname()

    def _ask_all(self, act: Callable[[Node], T]) -> list[tuple[Node, T]]:
        """Have all nodes do the same at once, and wait; the answers of those that are there."""
        give_up_at = self._give_up_at()
        here, *others = self.nodes
        asked = [(node, self._crew.begin(act, node)) for node in others]
        answers = [(here, act(here))]
        for node, future in asked:
            with self._losing(node):
                answers.append((node, await_result(future, give_up_at)))
        return answers

    def _give_up_at(self) -> Callable[[], float]:
        """Until when a node is waited for, Unix seconds: to the deadline of a stop, if one came."""
        soonest = time.time() + ANSWER_S_MIN

        def give_up_at() -> float:
            deadline = self.stop_request.deadline if self.stop_request is not None else None
            return math.inf if deadline is None else max(soonest, deadline - RESERVE_S)

        return give_up_at

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
