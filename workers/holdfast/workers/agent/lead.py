"""Node 0's agent: it leads every node through launches, a stop or a crash, to the outcome."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.errors import MissingNodesError
from holdfast.contracts.node import clocks
from holdfast.contracts.node.channel import ChannelHost
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.contracts.records.documents import LaunchRecord, Outcome
from holdfast.contracts.records.history import goes_on_after_numerics, stopped_for_numerics
from holdfast.contracts.spec.run_spec import steps_total
from holdfast.contracts.states import Cause
from holdfast.workers.agent import losses
from holdfast.workers.agent.blame import blame_checkpoint
from holdfast.workers.agent.context import LAUNCHES_MAX, AgentContext, NodePlace, take_number
from holdfast.workers.agent.health.gpus import GpuJudge
from holdfast.workers.agent.health.root_check import RootCheck
from holdfast.workers.agent.health.watch import HealthWatch
from holdfast.workers.agent.launch.warm_standby import StandbyPlan
from holdfast.workers.agent.neighbours import Neighbours
from holdfast.workers.agent.node import CrashReport, LedNode, NodeReport
from holdfast.workers.agent.node_group import NodeGroup
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops import sources
from holdfast.workers.agent.stops.agreement import StopAgreement
from holdfast.workers.agent.stops.departure import Departure, SlowNodes
from holdfast.workers.agent.stops.listener import StopListener
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.agent.succession import FIRST, begin_term, renew, step_back
from holdfast.workers.agent.watch.hangs import HangWatch
from holdfast.workers.agent.watch.paired_test import PairedTests
from holdfast.workers.decisions import causes, policy
from holdfast.workers.decisions.blame import HUNG_IN_LOAD, crash_facts
from holdfast.workers.decisions.drained_nodes import NodePlan

# How a launch ended, from node 0's view.

# The phases of a rank that only saves, or has left.
_PAST_TRAINING: Final = frozenset({"SAVE", "STOP", "DONE"})


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one launch ended: completed, stopped, crashed, hung or killed.

    `saved` are the steps that a program without a session recorded, see `steps_saved`.
    """

    ending: str
    exit_code: int | None
    reports: tuple[NodeReport, ...]
    crash_report: CrashReport
    hang: tuple[str, ...] = ()
    saved: tuple[int, int] = (NOWHERE, NOWHERE)

    @property
    def completed(self) -> int:
        """The last step that any rank is known to have finished, or `NOWHERE`."""
        return max(self.saved[1], *(r.completed for r in self.reports), NOWHERE)

    @property
    def resumed(self) -> int:
        """The step after which this launch started, or `NOWHERE`."""
        return max(self.saved[0], *(r.resumed for r in self.reports), NOWHERE)

    @property
    def is_loading(self) -> bool:
        """True if the ranks had begun to load a checkpoint and none of them had finished."""
        phases = {phase for report in self.reports for phase in report.phases}
        return "LOAD" in phases and self.resumed == NOWHERE

    def first_failure(self) -> dict[str, Any]:
        """Return the rank that failed first, as facts of a journal line; {} if none is named.

        A negative `rank_exit_code` is the signal that killed the rank.
        """
        first = causes.first_failure(self.crash_report.failures)
        if self.ending != "crashed" or first is None:
            return {}
        host = first.host or None
        return {"rank": first.rank, "host": host, "rank_exit_code": first.exit_code}

    @property
    def gained(self) -> bool:
        """True if this launch finished a step that was not finished before."""
        return self.completed > self.resumed

    @property
    def unsaved(self) -> str:
        """The recorded error that decides why this launch crashed, or ''.

        It is that of a save after which nothing was trained, if the ranks had ended training or
        left no error of their own.
        """
        phases = [phase for report in self.reports for phase in report.phases]
        is_past_training = bool(phases) and _PAST_TRAINING.issuperset(phases)
        crash = self.crash_report
        if any(failure.text for failure in crash.failures) and not is_past_training:
            return ""
        last = [save for save in crash.failed_saves if save.step >= self.completed]
        return str(last[0]) if last else crash.unwritten

    def record(self, number: int, started_at: float) -> LaunchRecord:
        """Return the record of this launch, which has just ended, for the attempt's outcome."""
        return LaunchRecord(
            number=number,
            started_at=started_at,
            ended_at=time.time(),
            exit_code=self.exit_code,
            first_step=self.resumed + 1 if self.resumed > NOWHERE else None,
            last_step=self.completed if self.gained else None,
            ending=self.ending,
        )


def steps_saved(
    events: Iterable[Event], attempt: int, launch: int, reports: Iterable[NodeReport]
) -> tuple[int, int]:
    """Return the step a launch resumed from and its newest saved one, each `NOWHERE` if unknown.

    `events` are rank 0's. Both are `NOWHERE` for a program with a session, whose ranks report.
    """
    resumed = saved = NOWHERE
    if any(report.registered for report in reports):
        return resumed, saved
    for event in events:
        step = event.data.get("step")
        if (event.data.get("attempt"), event.data.get("launch")) != (attempt, launch):
            continue
        if event.kind is EventKind.RESUMED and isinstance(step, int):
            resumed = step
        elif event.kind is EventKind.COMMITTED and isinstance(step, int):
            saved = max(saved, step)
    return resumed, saved


POLL_S: Final = 0.05
# The first failure may be secondary, so wait this long for the root cause on another node.
NEIGHBOUR_WAIT_S: Final = 2.0
RESTART_PAUSE_S: Final = 1.0
# How long the node that takes over waits for the others, which first end their ranks too.
JOIN_WAIT_S: Final = 20.0


@dataclass(frozen=True)
class Succeeded:
    """The term in which a node takes over, and the host of the lost lead."""

    term: int
    host: str


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
        self.launches: list[LaunchRecord] = []
        self.last: Ended | None = None
        self.verdict = ""
        self._journal, self._host = journal, host
        self._supervision = context.request.supervision
        self._stops = sources.StopWatch(context, lambda: runtime.step_s)
        self._listener = StopListener(context, signals, self._stops)
        self.group = NodeGroup(context, journal, self._listener, runtime)
        self.health = HealthWatch(context, self.group, self._listener, journal)
        self.gpus = GpuJudge(context.request.health, context.attempt.number, journal)
        self.root = RootCheck(context, self.group, journal)
        # Set if the program saves by itself, without a session.
        self.program = runtime.program if context.request.program.is_watched else None
        # How many nodes train, and what the next launch changes about them.
        self.nodes = context.nodes
        self._change: dict[str, Any] = {}
        self._restarts = 0
        # Nodes know the first term from the start.
        self._begun_term = FIRST
        self._announced: sources.StopRequest | None = None
        self._hangs = HangWatch(context.request, context.attempt, journal)
        self._agreement = StopAgreement(self.group, journal, context.attempt.number, self._note)
        ask_test = self._agreement.early_save.ask_test
        self._tests = PairedTests(context, self._hangs, ask_test, journal)
        self.slow = SlowNodes(context, self._tests, self._note)
        self._departure = Departure(
            context, self.group, self._agreement, self._listener, self._note, self.slow
        )
        self._runtime = runtime
        self._neighbours = Neighbours(context, self.group, journal, runtime)
        self._standby_plan = StandbyPlan(context, self.group.address, self._note)

    @property
    def stop_request(self) -> sources.StopRequest | None:
        """Why the attempt should stop, or None if nothing has requested it."""
        return self._listener.stop_request

    @property
    def world_size(self) -> int:
        """The number of ranks of the current launch, or of the next one."""
        return self.nodes * self.context.request.ranks_per_node

    def run(self) -> None:
        """Start launches until training ends, is stopped, or another launch is not worthwhile.

        Raises `AgreementError` if nodes do not join, unless it is known which hosts they are.
        """
        if not self._gather() or self.stop_request is not None or not self.root.passes():
            return
        if self.stop_request is not None or not self.health.passes("before"):
            return
        self.group.set_aside_spares()
        self._launch_until_done()
        self._listener.end()
        self._await_mirror()

    def take_over(self, before: Succeeded, runtime: NodeRuntime) -> None:
        """Continue an attempt whose lead is lost, on the nodes that join this one."""
        assert self._host is not None
        attempt = self.context.attempt
        number, report = runtime.heartbeat.launch, runtime.report()
        events = losses.events_of_leads(attempt)
        self.launches, started_at = losses.launches_before(events, number)
        ended = Ended(
            ending="crashed", exit_code=None, reports=(report,), crash_report=CrashReport()
        )
        self.last, self.nodes = ended, runtime.place.nodes
        self._journal.append(
            EventKind.LAUNCH_ENDED,
            attempt=attempt.number,
            launch=number,
            ending="crashed",
            exit_code=None,
            last_step=ended.completed if ended.gained else None,
        )
        self.launches.append(ended.record(number, started_at))
        self._listener.recall(losses.stop_of(events))
        left = set(range(self.context.nodes_of_job)) - losses.gone_numbers(events)
        self.group.gather_left(self._host, left - {self.context.node}, number, JOIN_WAIT_S)
        self.group.take_losses(before.host, self.nodes, number, events)
        self.group.term = before.term
        if self.stop_request is None and self._may_go_on(ended) and self.health.passes("after"):
            self._launch_until_done()
        self._listener.end()
        self._await_mirror()

    def _launch_until_done(self) -> None:
        for _ in range(LAUNCHES_MAX):
            self._begin_term()
            ended = self.last = self._run_launch(take_number(self.context.attempt))
            if ended.ending == "drained" and self.stop_request is None:
                if not self._depart(ended):
                    break
                continue
            if ended.ending not in {"crashed", "hung"} or self.stop_request is not None:
                break
            if not self._may_go_on(ended):
                break
            self._listener.wait(0.0 if ended.gained else RESTART_PAUSE_S)
            if self.stop_request is not None or not self.health.passes("after"):
                break

    def _begin_term(self) -> None:
        """Before the first launch of a term, let all nodes of the launch know the term."""
        term = self.group.term
        if term != self._begun_term:
            self.group.ask_all(lambda node: node.expect(term))
            begin_term(self.context, term)
            self._begun_term = term

    def _gather(self) -> bool:
        """Wait for the other nodes; return False if some of them end the attempt."""
        try:
            if self._host is not None:
                self.group.gather(self._host)
        except MissingNodesError as error:
            if self.root.blame(error):
                return False
            raise
        return True

    def acknowledge(self, outcome: Outcome) -> None:
        """Tell clouds that announced an end that they may proceed, if no step could be lost."""
        is_safe = outcome.last_step is None or outcome.committed_step == outcome.last_step
        if self.stop_request is None or self.stop_request.source != "notice" or not is_safe:
            return
        self.group.ask_all(lambda node: node.acknowledge())

    def close(self) -> None:
        self._listener.close()

    # --- one launch --------------------------------------------------------------------

    def _run_launch(self, number: int) -> Ended:
        started_at = time.time()
        self._agreement.begin()
        self._departure.begin()
        self.gpus.begin()
        port = self._standby_plan.take_port(number, self.group.nodes, self.group.reports.values())
        address = self.group.address()
        self._hangs.begin(number, self.world_size)
        self._tests.begin(number)
        self._journal.append(
            EventKind.LAUNCH_STARTED,
            attempt=self.context.attempt.number,
            launch=number,
            world_size=self.world_size,
            **self._change,
        )
        places = self.group.places()
        self.group.ask_all(
            partial(self._start, number=number, address=address, port=port, places=places)
        )
        self._change = {}
        self._neighbours.begin(number)
        self.group.forget_reports()
        ending = self._watch()
        trained_until = time.time()
        silent_s = self._hangs.silent_s(self.group.nodes, self.group.reports)
        ended = self._end_launch(ending, number)
        if self._has_departed(ended):
            ended = replace(ended, ending="drained")
        self.launches.append(ended.record(number, started_at))
        self._journal.append(
            EventKind.LAUNCH_ENDED,
            attempt=self.context.attempt.number,
            launch=number,
            ending=ended.ending,
            exit_code=ended.exit_code,
            last_step=ended.completed if ended.gained else None,
            trained_until=trained_until,
            hangs_from=trained_until - silent_s if silent_s else None,
            **ended.first_failure(),
            **self._crash_facts(ended),
        )
        return ended

    def _crash_facts(self, ended: Ended) -> dict[str, Any]:
        """Return in which way the last launch crashed, as facts of a journal line."""
        if self.stop_request is not None:
            return {}
        if ended.ending == "hung" and ended.is_loading and not self._hangs.is_on_storage:
            return {"cause": str(Cause.HANG), "crash": HUNG_IN_LOAD}
        if ended.ending != "crashed":
            return {}
        return crash_facts(*self.bad_ending(ended), None if ended.is_loading else ended.completed)

    @property
    def _is_alone(self) -> bool:
        """True if each node's torchrun runs without the others, as its warm standby does.

        Those of an attempt's first launch find each other.
        """
        if self.program is not None or self._supervision.standby_after_s == "off":
            return False
        return self.context.nodes_of_job > 1 and bool(self.launches)

    def _start(
        self,
        node: LedNode,
        *,
        number: int,
        address: str,
        port: int,
        places: Mapping[str, NodePlace],
    ) -> object:
        more: dict[str, Any] = {}
        if places:
            more["place"] = places[node.name]
        if self._is_alone:
            more["is_alone"] = True
        return node.start(number, address, port, **more)

    def _watch(self) -> str:
        """Wait for the launch's end, at most until a stop's deadline; return the kind of ending."""
        while True:
            self._listener.wait(POLL_S)
            self._handle_notices()
            self._announce()
            self.group.poll()
            self.gpus.look(self.group.reports)
            if ending := self._find_ending():
                return ending
            if (stop_request := self.stop_request) is None:
                if ending := self._leave_drained():
                    return ending
                continue
            if self._all_have_left():
                # torchrun itself takes seconds to exit, which the grace may not allow.
                return "left"
            ends_at = self._kill_at(stop_request)
            if clocks.now() > ends_at:
                return "killed"
            if self.program is None:
                self._agreement.pursue_stop(ends_at)

    def _leave_drained(self) -> str:
        """Stop the ranks if there are drained nodes to leave; return the ending once they have."""
        departure = self._departure
        if self.program is None and not self._agreement.is_reached and not self.group.is_silent:
            departure.look(self._remaining_s())
        if departure.plan is None:
            self._plan_ahead()
            return ""
        if self._all_have_left():
            return "left"
        if departure.is_overdue:
            return "killed"
        departure.pursue()
        return ""

    def _remaining_s(self) -> float | None:
        """Return how long the steps that are left take, or None if their number is unknown."""
        total = steps_total(self.context.request.config)
        done = max((report.completed for report in self.group.reports.values()), default=NOWHERE)
        return None if total is None else max(0, total - done) * self._runtime.step_s

    def _has_departed(self, ended: Ended) -> bool:
        """Return True if the launch ended to leave drained nodes."""
        is_asked = self._departure.plan is not None and self.stop_request is None
        return is_asked and ended.ending in {"stopped", "killed"}

    def _find_ending(self) -> str:
        """Return how the launch ended by itself, or '' if it has not."""
        if self.group.lost:
            return "crashed"
        codes = [report.exit_code for report in self.group.reports.values()]
        if any(code not in {None, 0} for code in codes):
            self._wait_for_neighbours()
            return "crashed" if self.stop_request is None else "stopped"
        if not self.group.is_whole:
            return ""
        if all(code == 0 for code in codes):
            return self._ending_of_leaving()
        if self._is_hung():
            return "hung" if self.stop_request is None else "killed"
        return ""

    def _wait_for_neighbours(self) -> None:
        """After a failure, give the node that caused it time to fail as well."""
        give_up = time.monotonic() + (NEIGHBOUR_WAIT_S if len(self.group.nodes) > 1 else 0.0)
        while time.monotonic() < give_up:
            time.sleep(POLL_S)
            self.group.poll()

    def _is_hung(self) -> bool:
        """Return True if the watch of silent ranks has proved a hang."""
        return self._hangs.look(self.group.nodes, self.group.reports)

    def _plan_ahead(self) -> None:
        """Agree on an early save that was requested, and start warm standbys once they are due."""
        if not self.group.is_whole or self.group.is_silent or self.program is not None:
            return
        self._tests.look([node.name for node in self.group.nodes])
        self._agreement.pursue_save()
        self._neighbours.look()
        reports = self.group.reports.values()
        self._standby_plan.look(self.group.nodes, self.group.spares, reports, len(self.launches))

    def _all_have_left(self) -> bool:
        """Return True if every rank of every node has stopped as agreed and exited."""
        reports = self.group.reports.values()
        ranks = sum(report.registered for report in reports)
        is_whole = ranks == self.world_size
        return self._agreement.is_reached and is_whole and all(r.has_left for r in reports)

    def _ending_of_leaving(self) -> str:
        stopped = any("STOP" in report.phases for report in self.group.reports.values())
        return "stopped" if stopped else "completed"

    def _end_launch(self, ending: str, number: int) -> Ended:
        """End every node's processes, let the flushers finish, and collect the reports."""
        group = self.group
        if group.lost and self.stop_request is None:
            self._give_way()
            # Before a lost node that is alive after all can take the term.
            group.term = renew(self.context)
        group.ask_all(lambda node: node.kill())
        self._drain()
        group.ask_reports()
        self.gpus.look(group.reports)
        is_bad = ending in {"crashed", "stopped"}
        crash_reports = group.ask_all(lambda node: node.crash_report()) if is_bad else []
        reports = tuple(group.reports.values())
        codes = [report.exit_code for report in reports]
        exit_code = next((code for code in codes if code), codes[0] if codes else None)
        has_left = ending == "left"
        attempt = self.context.attempt
        events = read_journal(attempt.rank_journal)[0]
        return Ended(
            ending=self._ending_of_leaving() if has_left else ending,
            exit_code=None if has_left else exit_code,
            reports=reports,
            crash_report=CrashReport.of_all([report for _, report in crash_reports]),
            hang=self._hangs.evidence,
            saved=steps_saved(events, attempt.number, number, reports),
        )

    def _give_way(self) -> None:
        """If this node is the one that is cut off, let another one continue with the others."""
        context, heartbeat = self.context, self._runtime.heartbeat
        if self.group.is_cut_off() and losses.may_continue_without(
            context, self.nodes, context.host
        ):
            self._note(f"{context.host} has lost the others, so it waits for another lead")
            self.group.ask_all(lambda node: node.kill())
            heartbeat.is_paused = True
            step_back(context, lambda: self.stop_request is not None)
            heartbeat.is_paused = False

    def _drain(self) -> None:
        """Let every node's flusher commit what is sealed."""
        group, began = self.group, clocks.now()

        def until() -> float:
            is_lost = bool(group.lost)
            return sources.drain_until(began, self._supervision, self.stop_request, is_lost=is_lost)

        # Files on the nodes' own disks count only once mirrored, so a restart waits for the mirror.
        has_local = bool(self.context.request.checkpoint.local)
        for name in group.drain_all(until, mirror=has_local):
            spent_s = clocks.now() - began
            self._note(f"the flusher of {name} did not finish within {spent_s:.0f} s")

    def _await_mirror(self) -> None:
        """Keep the nodes until all commits are mirrored or the time is up."""
        if not self.context.request.checkpoint.mirror:
            return
        until = clocks.now() + self._supervision.flush_timeout_s
        if self.stop_request is not None and self.stop_request.deadline is not None:
            until = min(until, self.stop_request.deadline - sources.RESERVE_S)

        def end() -> float:
            self.group.ask_reports()
            self._handle_notices()
            return min(until, self._listener.late_deadline - sources.RESERVE_S)

        if late := self.group.drain_all(end, mirror=True):
            self._note(f"the mirror did not receive all commits of {', '.join(late)} in time")

    # --- stopping ---------------------------------------------------------------------------

    def _handle_notices(self) -> None:
        """Journal and act on the notices of clouds since the last poll."""
        now, noticed = clocks.now(), self.group.take_notices()
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
                self._agreement.early_save.ask()
        for host, notice in noticed:
            if notice.wants == "stop":
                self._listener.accept(self._stops.from_notice(notice, host, now))

    def _announce(self) -> None:
        """Announce a new stop request and its deadline to all nodes' ranks."""
        stop_request = self.stop_request
        if stop_request is not None and stop_request != self._announced:
            self._announced = stop_request
            self.group.announce(stop_request.deadline)

    def _kill_at(self, stop_request: sources.StopRequest) -> float:
        """Return when processes that still run are killed (Unix seconds)."""
        has_session = self.program is not None or any(
            report.registered for report in self.group.reports.values()
        )
        return sources.kill_at(stop_request, self._supervision, has_session=has_session)

    # --- drained nodes ----------------------------------------------------------------------

    def _depart(self, ended: Ended) -> bool:
        """Continue without the drained nodes; return False if it cannot, after a loss of others."""
        plan = self._departure.plan
        assert plan is not None
        training = [node.name for node in self.group.nodes]
        # Spare nodes may have been lost since the plan.
        now = self._plan_without(plan.leave)
        leave = [host for host in plan.leave if host in training]
        slow = self.slow.have_left(leave, training, are_replaced=now.way == "spare")
        self.group.release(leave, self.launches[-1].number)
        if self.group.lost:
            return self._go_on_without(ended, why=plan.why, slow=slow)
        # Before a node that was left can take the term.
        self.group.term = renew(self.context)
        if not now.way:
            self.verdict = now.reason
            self._note(f"stop after a drain: {now.reason}")
            return False
        self._change_nodes(now, why=plan.why, slow=slow)
        return True

    def _plan_without(self, left: Sequence[str]) -> NodePlan:
        """Return how the attempt continues without the lost nodes, and those that it leaves."""
        group = self.group
        lost, left = group.lost, [host for host in left if host not in group.lost]
        spares = len(group.spares)
        return losses.plan_without(
            self.context, nodes=self.nodes, lost=lost, left=left, spares=spares
        )

    def _change_nodes(self, plan: NodePlan, *, why: str = "", slow: Sequence[str] = ()) -> None:
        """Let the next launch begin on the nodes of a plan. `why` some are left, `slow` ones."""
        lost, left, self.nodes = self.group.lost, self.group.left, plan.nodes
        joined = self.group.rearrange(plan.nodes)
        self._change = {"way": plan.way, "nodes": plan.nodes, "lost": lost, "joined": joined}
        if left:
            self._change |= {"drained": left, "reason": why, **({"slow": slow} if slow else {})}

    # --- endings ----------------------------------------------------------------------------

    def _may_go_on(self, ended: Ended) -> bool:
        """Decide about another launch, on all nodes or without the lost ones."""
        return self._go_on_without(ended) if self.group.lost else self._may_restart(ended)

    def _go_on_without(self, ended: Ended, *, why: str = "", slow: Sequence[str] = ()) -> bool:
        """Decide about another launch without the lost nodes; the rest as in `_change_nodes`."""
        plan = self._plan_without(self.group.left)
        cause = self.bad_ending(ended)[0].cause
        self.launches[-1] = self.launches[-1].model_copy(update={"cause": cause})
        self.verdict = plan.reason
        self._note(f"{plan.way or 'stop'} after a loss: {plan.reason}")
        if plan.way:
            self._change_nodes(plan, why=why, slow=slow)
        return bool(plan.way)

    def _may_restart(self, ended: Ended) -> bool:
        """Decide about another launch on the same nodes, and journal the decision."""
        ending, number = self.bad_ending(ended)[0], self.launches[-1].number
        self.launches[-1] = self.launches[-1].model_copy(update={"cause": ending.cause})
        may_blame = "crash" in self._crash_facts(ended)
        decision = policy.decide_in_place(
            ending,
            restarts=self._restarts,
            restarts_max=self._supervision.restarts_in_place,
            lost_nodes=self.group.lost,
            gained_steps=ended.gained,
            hangs=self.context.request.hangs_before
            + sum(one.cause is Cause.HANG for one in self.launches),
            hangs_max=self._supervision.budgets.get(Cause.HANG, policy.BUDGETS[Cause.HANG]),
            rolled_back=goes_on_after_numerics(*self._last_events()),
            blamed=blame_checkpoint(self.context, number, self._journal) if may_blame else "",
        )
        self.verdict = decision.reason
        self._note(f"{decision.action} in place: {decision.reason}")
        self._restarts += 1
        return decision.action == "restart"

    def bad_ending(self, ended: Ended) -> tuple[causes.Ending, causes.RankFailure | None]:
        """Return how the crashed or hung launch ended, and the rank that failed first."""
        if ended.hang:
            ending, first = causes.hung_ending(ended.hang), self._first_hung()
        else:
            ending, first = ended.crash_report.classify(self.group.lost, ended.unsaved)
        ending = causes.with_numerics_stop(ending, stopped_for_numerics(*self._last_events()))
        return self.gpus.explain(ending, len(ended.reports)), first

    def _first_hung(self) -> causes.RankFailure | None:
        """Return the rank that the others wait for, if the flight records name only one host."""
        nodes = self.group.nodes
        places = {rank // self.context.request.ranks_per_node for rank in self._hangs.missing}
        if len(places) != 1 or max(places) >= len(nodes):
            return None
        first = min(self._hangs.missing)
        return causes.RankFailure(rank=first, exit_code=0, host=nodes[places.pop()].name)

    def _last_events(self) -> tuple[list[Event], int, int]:
        """Return rank 0's journal, and the numbers of this attempt and its last launch."""
        attempt = self.context.attempt
        return read_journal(attempt.rank_journal)[0], attempt.number, self.launches[-1].number

    def _note(self, text: str) -> None:
        self._journal.append(EventKind.NOTE, attempt=self.context.attempt.number, text=text)
