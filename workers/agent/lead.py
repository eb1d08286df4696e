"""Node 0's agent: it leads every node through launches, a stop or a crash, to the outcome."""

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
from holdfast.workers.causes import Ending, RankFailure, hung_ending, with_numerics_stop
from holdfast.workers.policy import BUDGETS, Decision, decide_in_place

POLL_S: Final = 0.05
REMOTE_POLL_S: Final = 0.25
# The first failure may be secondary, so wait this long for the root cause on another node.
NEIGHBOUR_WAIT_S: Final = 2.0
AGREE_TRIES_MAX: Final = 20
AGREE_PAUSE_S: Final = 0.5
# The part of the grace that is reserved for writing the outcome before the scheduler's KILL.
RESERVE_S: Final = 1.5
CRASH_DRAIN_S: Final = 300.0
# A lost node writes no more files, so only steps that are complete without it are waited for.
LOST_DRAIN_S: Final = 30.0
RESTART_PAUSE_S: Final = 1.0
ANSWER_S_MIN: Final = 0.5

T = TypeVar("T")


class Lead:
    """Leads one attempt, and journals its work in node 0's journal."""

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
        """Why the attempt should stop, or None if nothing has requested it."""
        return self._listener.stop_request

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are not lost, this one first."""
        return [self._runtime, *(r for r in self._remotes if r.name not in self.lost)]

    def run(self) -> None:
        """Start launches until training ends, is stopped, or another launch is not worthwhile.

        Raises `AgreementError` if a node does not join.
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
        """Wait for the other nodes, unless a stop is requested meanwhile."""
        if self._host is None:
            return
        timeout_s = self.context.request.supervision.join_timeout_s
        self._host.wait_for_peers(timeout_s, is_over=lambda: self.stop_request is not None)
        peers = sorted(self._host.peers.items())
        self._remotes = [RemoteNode(peer, self._crew.post) for _, peer in peers]

    def acknowledge(self, outcome: Outcome) -> None:
        """Tell clouds that announced an end that they may proceed, if no step could be lost."""
        is_safe = outcome.last_step is None or outcome.committed_step == outcome.last_step
        if self.stop_request is None or self.stop_request.source != "notice" or not is_safe:
            return
        self._ask_all(lambda node: node.acknowledge())

    def finish(self) -> None:
        """Tell the other nodes' agents to exit."""
        there = [remote for remote in self._remotes if remote.name not in self.lost]
        for going in [self._crew.begin(RemoteNode.finish, remote) for remote in there]:
            with contextlib.suppress(ConnectionError):
                await_result(going, self._give_up_at())

    def close(self) -> None:
        """Close the listener and the connections' threads."""
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
        # Each node's last report belongs to the previous launch.
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
        """Wait for the launch's end, at most until a stop's deadline; return the kind of ending."""
        while True:
            self._listener.wait(POLL_S)
            self._poll_nodes()
            self._handle_notices()
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
                    # The next poll will find this node lost.
                    self._standby_plan.look(self.nodes, reports, len(self.launches))
                continue
            self._agree(stop_request)
            if self._all_have_left():
                # torchrun itself takes seconds to exit, which the grace may not allow.
                return "left"
            if time.time() > self._kill_at(stop_request):
                return "killed"

    def _is_hung(self) -> bool:
        """Return True if the watch of silent ranks has proved a hang."""
        try:
            return self._hangs.look(self.nodes, self._reports)
        except ConnectionError:
            # The next poll will find the node lost, and training ends for that reason.
            return False

    def _all_have_left(self) -> bool:
        """Return True if every rank of every node has stopped as agreed and exited."""
        reports = self._reports.values()
        ranks = sum(report.registered for report in reports)
        is_whole = ranks == self.context.request.world_size
        return self._has_agreed and is_whole and all(report.has_left for report in reports)

    def _end_launch(self, ending: str) -> Ended:
        """End every node's processes, let the flushers finish, and collect the reports."""
        self._collect_reports()
        self._ask_all(lambda node: node.kill())
        began = time.time()
        until = partial(self._drain_until, began)
        # Files on the nodes' own disks count only once mirrored, so a restart waits for the mirror.
        has_local = bool(self.context.request.checkpoint_local)
        for name in drain_all(self._ask_all, self._lost_numbers, until, mirror=has_local):
            spent_s = time.time() - began
            self._note(f"the flusher of {name} did not finish within {spent_s:.0f} s")
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
        """Take this node's report, and the others' a few times a second, without waiting."""
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
        """Wait for the pending reports, because they contain signals that the agents received."""
        for node in self.nodes[1:]:
            asked = self._asked.pop(node.name, None)
            if asked is not None:
                with self._losing(node):
                    self._take(node, await_result(asked, self._give_up_at()))

    def _take(self, node: Node, report: NodeReport) -> None:
        """Store a node's report and pass on the signals and notices in it."""
        self._reports[node.name] = report
        for name in report.signals:
            self._listener.hear(name)
        self._noticed += [(node.name, notice) for notice in report.notices]

    def _wait_for_neighbours(self) -> None:
        """After a failure, give the node that caused it time to fail as well."""
        give_up = time.monotonic() + (NEIGHBOUR_WAIT_S if len(self.nodes) > 1 else 0.0)
        while time.monotonic() < give_up:
            time.sleep(POLL_S)
            self._poll_nodes()

    # --- stopping ---------------------------------------------------------------------------

    def _handle_notices(self) -> None:
        """Handle the notices of clouds since the last poll."""
        for stop_request in self._notices(time.time()):
            self._listener.accept(stop_request)

    def _announce(self) -> None:
        """Announce a new stop request and its deadline to all nodes' ranks."""
        stop_request = self.stop_request
        if stop_request is None or stop_request == self._announced:
            return
        self._announced = stop_request
        for node in self.nodes:
            with self._losing(node):
                node.announce(stop_request.deadline)

    def _notices(self, now: float) -> list[StopRequest]:
        """Journal the new notices; return the stop requests of those that end a node."""
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
        """Return the seconds in which nodes must answer: a part of what is left for all tries."""
        left_s = self._kill_at(stop_request) - time.time()
        return max(ANSWER_S_MIN, min(AGREE_WAIT_S, left_s / 4))

    def _agree(self, stop_request: StopRequest) -> None:
        """Bring all ranks to one step. Failed tries are repeated, up to a maximum."""
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
            # The next poll will find the node lost, and training ends for that reason.
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
        """Return when processes that still run are killed (Unix seconds).

        A program that never used the status table cannot stop with a checkpoint, so it gets only
        the grace.
        """
        supervision = self.context.request.supervision
        limit_s = supervision.flush_timeout_s
        if not any(report.registered for report in self._reports.values()):
            limit_s = supervision.grace_s
        kill_at, deadline = stop_request.requested_at + limit_s, stop_request.deadline
        return kill_at if deadline is None else min(deadline - RESERVE_S, kill_at)

    def _drain_until(self, began: float) -> float:
        """Return until when flushers that drain since `began` are waited for (Unix seconds)."""
        longest_s = self.context.request.supervision.flush_timeout_s
        if self.lost:
            longest_s = min(longest_s, LOST_DRAIN_S)
        stop_request = self.stop_request
        if stop_request is not None and stop_request.deadline is not None:
            return max(began + 1.0, min(stop_request.deadline, began + longest_s))
        return began + (min(CRASH_DRAIN_S, longest_s) if stop_request is None else longest_s)

    def _await_mirror(self) -> None:
        """Keep the nodes until all commits are mirrored or the time is up."""
        if not self.context.request.checkpoint_mirror:
            return
        until = time.time() + self.context.request.supervision.flush_timeout_s
        if self.stop_request is not None and self.stop_request.deadline is not None:
            until = min(until, self.stop_request.deadline - RESERVE_S)

        def end() -> float:
            for node, report in self._ask_all(lambda node: node.report()):
                self._take(node, report)
            self._handle_notices()
            return min(until, self._listener.late_deadline - RESERVE_S)

        if late := drain_all(self._ask_all, self._lost_numbers, end, mirror=True):
            self._note(f"the mirror did not receive all commits of {', '.join(late)} in time")

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
            rolled_back=goes_on_after_numerics(*self._last_events()),
        )

    def bad_ending(self, ended: Ended) -> tuple[Ending, RankFailure | None]:
        """Return how the crashed or hung launch ended, and the rank that failed first."""
        crash = ended.crash_report
        ending, first = (hung_ending(ended.hang), None) if ended.hang else crash.classify(self.lost)
        return with_numerics_stop(ending, stopped_for_numerics(*self._last_events())), first

    def _last_events(self) -> tuple[list[Event], int, int]:
        """Return rank 0's journal, and the numbers of this attempt and its last launch."""
        attempt = self.context.attempt
        return read_journal(attempt.rank_journal)[0], attempt.number, self.launches[-1].number

    def _address(self) -> str:
        """Return the address at which the ranks of all nodes reach this one."""
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
        """Run `act` for all nodes at once and wait; return the answers of those not lost."""
        give_up_at = self._give_up_at()
        here, *others = self.nodes
        asked = [(node, self._crew.begin(act, node)) for node in others]
        answers = [(here, act(here))]
        for node, future in asked:
            with self._losing(node):
                answers.append((node, await_result(future, give_up_at)))
        return answers

    def _give_up_at(self) -> Callable[[], float]:
        """Return a function for the time limit of answers: the deadline of a stop, if any."""
        soonest = time.time() + ANSWER_S_MIN

        def give_up_at() -> float:
            deadline = self.stop_request.deadline if self.stop_request is not None else None
            return math.inf if deadline is None else max(soonest, deadline - RESERVE_S)

        return give_up_at

    @contextlib.contextmanager
    def _losing(self, node: Node) -> Iterator[None]:
        """Mark a node that does not answer as lost, and journal that once."""
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
