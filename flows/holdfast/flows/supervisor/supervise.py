"""The supervisor: watch one run, decide what to do next, and do it, until the run has ended.

Its whole state is on disk and in the scheduler, so a supervisor that dies loses nothing. The next
one reads the same history and continues. One supervisor at a time acts on a run (`flow.lock`). A
second one follows the run until the lock is free.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from holdfast.contracts import errors
from holdfast.contracts.disk.filesystems import refresh
from holdfast.contracts.disk.journal import GROWER, EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.documents import SubmissionTry, read_document
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.history_cache import HistoryReader, load_tallied
from holdfast.contracts.records.orders import open_orders
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows.supervisor import secrets
from holdfast.flows.supervisor.deliveries import Deliveries
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.flows.supervisor.limits import LimitWatch
from holdfast.flows.supervisor.outbox import Service
from holdfast.flows.supervisor.redactor import Log, Redactor
from holdfast.flows.supervisor.submission import JOURNAL, Companion, Submit
from holdfast.flows.supervisor.summary import ProgressLog
from holdfast.lineage.index import Index
from holdfast.workers.checkpoints import deletion
from holdfast.workers.checkpoints.consumers import Consumers
from holdfast.workers.decisions.exclusions import excluded_hosts
from holdfast.workers.decisions.growth import CapacityObservation, find_growth
from holdfast.workers.decisions.places import ReturnWatch, place_of
from holdfast.workers.decisions.policy import Decision, decide, wait_after_refusal
from holdfast.workers.nodes.heartbeats import HeartbeatWatch, clock_problems, read_heartbeats
from holdfast.workers.runs import (
    attempts,
    endings,
    operator,
    restarts,
    run_folders,
    successors,
    tending,
)
from holdfast.workers.runs.feasibility import Feasibility
from holdfast.workers.runs.reconcile import reconcile
from holdfast.workers.schedulers import ask_capacity, executor_for
from holdfast.workers.schedulers.slurm_capacity import Room

NAMED_MAX: Final = 16


class NodeWatch:
    """Watches the heartbeats of the live attempt. The supervisor calls `look` at every turn.

    The agents and the scheduler react to a lost node. The supervisor only logs and journals it.
    """

    def __init__(self) -> None:
        self._number = 0
        self._watch: HeartbeatWatch | None = None
        self._are_clocks_checked = False

    def look(self, attempt: AttemptPaths, heartbeat_s: float, journal: JournalWriter) -> list[str]:
        """Journal which nodes became silent or are heard again; return messages about it."""
        if self._watch is None or self._number != attempt.number:
            self._watch = HeartbeatWatch(attempt, heartbeat_s)
            self._number, self._are_clocks_checked = attempt.number, False
        silent, again = self._watch.look()
        for names, is_silent in ((silent, True), (again, False)):
            if names:
                shown = sorted(names)[:NAMED_MAX]
                facts = {"attempt": attempt.number, "nodes": shown, "count": len(names)}
                journal.append(EventKind.NODE_SILENT, durable=False, silent=is_silent, **facts)
        problems = self._check_clocks(attempt)
        for text in problems:
            journal.append(EventKind.NOTE, durable=False, attempt=attempt.number, text=text)
        messages = [f"no more heartbeats from {_some(silent)}"] if silent else []
        messages += [f"heartbeats again from {_some(again)}"] if again else []
        return messages + problems

    def _check_clocks(self, attempt: AttemptPaths) -> list[str]:
        """Return problems with the nodes' clocks. Checks once, with the first heartbeats."""
        if self._are_clocks_checked:
            return []
        beats = read_heartbeats(attempt)
        self._are_clocks_checked = bool(beats)
        return clock_problems(beats, time.time())[:NAMED_MAX]


def _some(names: list[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(sorted(names)[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


# Index updates in a thread, so that a slow database does not delay supervision.

FINISH_S_MAX: Final = 120.0
QUIET_S: Final = 30.0
# An ingest of a run with tens of thousands of checkpoints takes long, so it is done less often:
# after so many times the processor time that it took beyond `FREE_S`.
REST: Final = 50.0
FREE_S: Final = 0.25
# For so long, the ranks of a local attempt have the processors for themselves: the first ingest
# imports SQLAlchemy, and may have to make the schema.
START_S: Final = 10.0


class Ingestion:
    """Ingests one run in a separate thread, which ends when there is nothing to do.

    That thread calls `failed` with the error of a failed ingest, and `succeeded` after a
    successful one.
    """

    def __init__(
        self,
        index: Index,
        paths: RunPaths,
        *,
        failed: Callable[[Exception], None],
        succeeded: Callable[[], None],
    ) -> None:
        self._index, self._paths = index, paths
        self._failed, self._succeeded = failed, succeeded
        self._lock = threading.Lock()
        self._is_wanted = False
        # What the last request was about, and when it was made.
        self._asked: tuple[int, RunState] | None = None
        self._asked_at = 0.0
        self._rests_until = 0.0
        self._thread: threading.Thread | None = None

    def ask(self, history: RunHistory | None = None) -> None:
        """Request an ingest of the run's current state. Returns at once.

        A `history` without anything new is ingested every `QUIET_S` seconds only, for logged
        metrics. An ingest looks at every file of the run. After a long one, and while the ranks of
        a local attempt start, requests are ignored for a while. The supervisor makes them again in
        each turn.
        """
        if history is not None and _is_starting_here(history):
            return
        now = time.monotonic()
        state = None if history is None else (history.tally.lines, history.state)
        with self._lock:
            if state is not None and now < self._rests_until:
                return
            if state is not None and state == self._asked and now - self._asked_at < QUIET_S:
                return
            self._asked, self._asked_at = state, now
            self._is_wanted = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="holdfast-ingest", daemon=True
                )
                self._thread.start()

    def finish(self) -> None:
        """Ingest the run's last state, and wait for it for at most `FINISH_S_MAX` seconds."""
        self.ask()
        thread = self._thread
        if thread is not None:
            thread.join(FINISH_S_MAX)

    def _work(self) -> None:
        while self._take():
            spent_s = -time.thread_time()
            try:
                self._index.update(self._paths)
            # Disk is the truth, so a failed update can be repeated later.
            except (errors.HoldfastError, OSError) as error:
                self._asked = None
                self._failed(error)
            else:
                self._succeeded()
            spent_s += time.thread_time()
            self._rests_until = time.monotonic() + REST * max(0.0, spent_s - FREE_S)

    def _take(self) -> bool:
        """Return whether an ingest is wanted. If not, mark this thread as ended."""
        with self._lock:
            if not self._is_wanted:
                self._thread = None
                return False
            self._is_wanted = False
            return True


def _is_starting_here(history: RunHistory) -> bool:
    if history.spec.resources.executor != "local" or not history.state.is_live:
        return False
    last = history.attempts[-1] if history.attempts else None
    # The first turn submits the attempt after it has read the history.
    since = history.record.created_at if last is None else last.submitted_at
    is_over = last is not None and last.ended_at is not None
    return since is not None and not is_over and 0 <= time.time() - since < START_S


SUPERVISION_S_MAX: Final = 366 * 24 * 3600.0
PRUNE_S: Final = 60.0
# Pruning a run that keeps tens of thousands of checkpoints takes long, so it is done less often:
# after so many times the processor time that it took beyond `PRUNE_FREE_S`.
PRUNE_REST: Final = 250.0
PRUNE_FREE_S: Final = 0.05
SOON_S: Final = 1.0
# Consumers start soon after a commit, whatever `supervision.poll_s` is.
CONSUMER_S: Final = 2.0
FAILING_S_MAX: Final = 24 * 3600.0
FAILURE_WAIT_S: Final = 10.0


@dataclass
class Supervisor:
    """Supervises one run in this process. Times are seconds of the monotonic clock."""

    paths: RunPaths
    index: Index
    log: Log
    submit: Submit
    flow_run: str = ""
    redactor: Redactor = field(default_factory=Redactor)
    services: Mapping[str, Service] = field(default_factory=dict)
    companion: Companion | None = None
    is_acting: bool = False
    is_leaving: bool = False
    _warned: set[str] = field(default_factory=set)
    _absences: attempts.Absences = field(default_factory=attempts.Absences)
    _failing_since: float | None = None
    _lock: FlowLock = field(init=False)
    _ingestion: Ingestion = field(init=False)
    _pruned_at: int = -1
    _prune_after: float = 0.0
    _prune_again_at: float = 0.0
    _capacity: CapacityObservation | None = None
    _nodes: NodeWatch = field(default_factory=NodeWatch)
    _return: ReturnWatch = field(default_factory=ReturnWatch)
    _comments: tending.CommitComments = field(default_factory=tending.CommitComments)
    _history: HistoryReader = field(init=False)
    _progress: ProgressLog = field(init=False)
    _limits: LimitWatch = field(init=False)
    _deliveries: Deliveries = field(init=False)
    _consumers: Consumers = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.redactor.log(self.log)
        self._history, self._lock = HistoryReader(self.paths), FlowLock(self.paths.flow_lock)
        self._history.share()
        self._progress, self._limits = ProgressLog(self.log), LimitWatch(self.log)
        self._deliveries = Deliveries(self.paths, self.services, self.log, self.redactor)
        self._consumers = Consumers(self.paths)
        self._ingestion = Ingestion(
            self.index,
            self.paths,
            failed=lambda error: self._warn_once(
                "database", "the index was not updated; trying again later: %s", error
            ),
            succeeded=lambda: self._warned.discard("database"),
        )

    def run(self) -> RunHistory:
        """Supervise the run, or follow its supervisor, until it has ended; return its history.

        A `companion` may end this earlier, while the run is paused. Raises `SpecError` for another
        user's run, `ServiceError` after `SUPERVISION_S_MAX` seconds.
        """
        run_folders.require_own(self.paths)
        ends_at = time.monotonic() + SUPERVISION_S_MAX
        with (
            self._lock,
            JournalWriter(self.paths.journal_of(JOURNAL)) as journal,
        ):
            while time.monotonic() < ends_at:
                wait_s = self._turn(journal)
                if wait_s is None and (history := self._finish()) is not None:
                    return history
                # Without a history, an order came meanwhile, and its command saw a supervisor.
                time.sleep(SOON_S if wait_s is None else wait_s)
        raise errors.ServiceError(
            f"{self.paths.name} has not ended within {SUPERVISION_S_MAX:.0f} s, the limit of one "
            "supervisor. Submit the same spec again to start another."
        )

    def _turn(self, journal: JournalWriter) -> float | None:
        """Observe and act once. Return the seconds until the next turn, or None at the run's end.

        A shared file system can be unavailable or full for a while, so supervision ends only
        after `FAILING_S_MAX` seconds of failing turns. The index is updated last, in a thread of
        its own.
        """
        try:
            if not self.is_acting and (self._lock.is_held or self._lock.try_take()):
                self._take_up(journal)
            history = reconcile(self.paths, writer=JOURNAL, load=self._history.load)
            self.redactor.learn(history.record.spec, self.paths)
            wait_s = self._act(history, journal) if self.is_acting else self._follow(history)
            if self.is_acting and history.spec.on:
                wait_s, history = self._serve_consumers(history, journal, wait_s)
            self._prune(history)
        except OSError as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since > FAILING_S_MAX:
                raise
            self._warn_once(
                "storage", "storage fails; trying again every %.0f s: %s", FAILURE_WAIT_S, error
            )
            return FAILURE_WAIT_S
        self._failing_since = None
        self._warned.discard("storage")
        self._ingestion.ask(history)
        if self.is_acting:
            self._deliveries.offer(history)
        if self.companion is not None and self.companion.look(history):
            self.is_leaving = True
            return None
        return wait_s

    def _take_up(self, journal: JournalWriter) -> None:
        """Become the acting supervisor, and complete the journal of the one before."""
        # The previous supervisor may have run on another host.
        for directory in (self.paths.attempts, self.paths.journal):
            refresh(directory)
        with contextlib.suppress(OSError):
            run_folders.keep_reserve(self.paths)
        attempts.complete_journal(self.paths, journal)
        endings.complete_goodput(self.paths, journal)
        host, pid = socket.gethostname(), os.getpid()
        journal.append(EventKind.SUPERVISED, host=host, pid=pid, flow_run=self.flow_run)
        self.is_acting = True
        self.log.info("supervising %s at %s", self.paths.name, self.paths.directory)

    def _serve_consumers(
        self, history: RunHistory, journal: JournalWriter, wait_s: float | None
    ) -> tuple[float | None, RunHistory]:
        """Start and follow consumers; return the wait, and the history that pruning needs.

        Their failure never concerns the training. A run that has ended is supervised until its
        last consumer has ended.
        """
        has_ended = wait_s is None
        if has_ended:
            history = self._history.load()
        try:
            turn = self._consumers.tend(history, journal)
        except errors.SchedulerError as error:
            self._warn_once("consumers", "consumers wait for the scheduler: %s", error)
            return (history.spec.supervision.poll_s if wait_s is None else wait_s), history
        except (errors.HoldfastError, ValueError) as error:
            self._warn_once(str(error), "consumers were not started: %s", error)
            return wait_s, history
        self._warned.discard("consumers")
        for message in turn.messages:
            self.log.info("%s", message)
        if turn.has_new or turn.has_closed:
            # Otherwise pruning would not know what is needed.
            history = self._history.load()
        if turn.has_closed:
            # After the run's end, nobody else deletes what the last consumer kept.
            self._pruned_at, self._prune_after = -1, 0.0 if has_ended else self._prune_after
        if wait_s is None:
            return (SOON_S if turn.is_open else None), history
        return min(wait_s, CONSUMER_S), history

    def _prune(self, history: RunHistory) -> None:
        """Apply the spec's keep rules if checkpoints have changed, and every `PRUNE_S` seconds.

        The latter notices that a time to live has passed or a reader has finished.
        """
        if not self.is_acting or not history.spec.checkpoint.keep.is_limited:
            return
        now, committed = time.monotonic(), history.tally.committed
        is_due = committed != self._pruned_at or now >= self._prune_again_at
        if not is_due or now < self._prune_after:
            return
        spent_s = -time.thread_time()
        try:
            for one in deletion.apply(self.paths, by="keep rules", writer=JOURNAL, history=history):
                self.log.info("deleted %s: %s", one.name, one.reason)
        except errors.HoldfastError as error:
            self.log.warning("checkpoints were not pruned: %s", error)
        # If a checkpoint was committed meanwhile, the next turn prunes again.
        self._pruned_at = committed
        spent_s += time.thread_time()
        self._prune_after = now + PRUNE_REST * max(0.0, spent_s - PRUNE_FREE_S)
        self._prune_again_at = now + PRUNE_S

    def _follow(self, history: RunHistory) -> float | None:
        """Log progress while another supervisor acts. Return the seconds until the next turn."""
        if "follow" not in self._warned:
            self._warned.add("follow")
            self.log.info("another supervisor acts on %s; following the run", self.paths.name)
        self._progress.show(history)
        return history.spec.supervision.poll_s if history.state.is_live else None

    def _act(self, history: RunHistory, journal: JournalWriter) -> float | None:
        """Act once. Return the seconds until the next turn, or None if the run has ended."""
        wait_s: float | None = history.spec.supervision.poll_s
        try:
            last = history.last_attempt
            if last is None or last.state.is_terminal:
                wait_s = self._decide(history, journal)
            else:
                self._tend(history, journal)
        except errors.SchedulerUnavailableError as error:
            self._warn_once("scheduler", "the scheduler does not respond; waiting: %s", error)
        except (errors.OrdersChangedError, errors.RequestConflictError) as error:
            self.log.info("%s", error)
            wait_s = SOON_S
        except errors.RunConflictError as error:
            # A file system may show another supervisor's attempt late, so try again.
            self._warn_once("conflict", "%s", error)
        except errors.SchedulerError as error:
            self._warn_once(str(error), "%s", error)
        else:
            self._warned.discard("scheduler")
        return wait_s

    def _tend(self, history: RunHistory, journal: JournalWriter) -> None:
        """Manage a live attempt: complete its submission, log problems and progress, grow it."""
        attempt = self.paths.attempt(self.paths.attempt_numbers()[-1])
        if attempts.is_unsubmitted(attempt):
            self._submit_again(history, attempt, journal)
        for message in attempts.end_duplicates(attempt, journal):
            self.log.warning("%s", message)
        if message := operator.carry_out(history):
            self.log.info("%s", message)
        for message in self._nodes.look(attempt, history.spec.supervision.heartbeat_s, journal):
            self.log.warning("%s", message)
        now = time.time()
        if message := (
            operator.move_on(history, now=now, writer=JOURNAL)
            or operator.return_when_free(self._return, history, now=now, writer=JOURNAL)
            or tending.take_back_overdue(history, now=now, writer=JOURNAL)
            or tending.allow_hosts_again(history, now=now, writer=JOURNAL)
        ):
            self.log.warning("%s", message)
        self._progress.show(history)
        self._limits.look(history, journal)
        self._grow(history)
        restarts.tend(history, journal)
        tending.tell_drained_nodes(history)
        self._comments.tend(history)
        if message := successors.tend(history, journal, now=now):
            self.log.info("%s", message)

    def _submit_again(
        self, history: RunHistory, attempt: AttemptPaths, journal: JournalWriter
    ) -> None:
        """Complete a submission: search for its job, and submit it if there certainly is none.

        An operator's request or a permanent refusal ends the attempt instead.
        """
        asked = history.pending_request
        if asked is not None and attempts.has_no_job(attempt):
            who = f"{asked['action']} by {asked.get('by') or 'an operator'}"
            if _end_by_order(attempt, journal, f"{who} before the job was submitted"):
                return
        tried = read_document(SubmissionTry, attempt.submitting)
        if tried is not None and tried.refused:
            wait_s = wait_after_refusal(tried, now=time.time())
            if wait_s is None:
                times = counted(tried.refusals, "time")
                evidence = f"the scheduler refused the job {times}: {tried.refused}"
                state, cause = AttemptState.FAILED, Cause.INFRASTRUCTURE
                attempts.end_unsubmitted(
                    attempt, journal, state=state, cause=cause, evidence=evidence
                )
                return
            if wait_s > 0:
                return
        try:
            attempts.resume_submission(self.paths, journal, self._absences)
        except errors.NotFoundError:
            attempts.abandon_reservation(attempt, journal)
        except errors.OrdersChangedError as error:
            _end_by_order(attempt, journal, str(error))

    def _grow(self, history: RunHistory) -> None:
        """Relaunch the attempt on more GPUs if the spec allows it and they are free."""
        last, spec = history.last_attempt, history.spec
        if not spec.elastic.grow or last is None or last.state is not AttemptState.RUNNING:
            self._capacity = None
            return
        attempt = self.paths.attempt(last.number)
        per_node = last.request.gpus_on_node if last.request else 0
        held = {beat.host: per_node for beat in read_heartbeats(attempt)}
        now, fits = time.time(), Feasibility.of(history).allows
        exclude = excluded_hosts(history.attempts, now)
        ask = ask_capacity(spec.resources.at(place_of(last)), held, exclude)
        self._capacity, gpus = find_growth(history, ask, self._capacity, now=now, fits=fits)
        if not gpus:
            return
        message = operator.request(
            self.paths,
            "relaunch",
            by=GROWER,
            gpus=gpus,
            writer=JOURNAL,
            seen=history.newest_order,
        )
        self.log.info("%d GPUs are available: %s", gpus, message)

    def _decide(self, history: RunHistory, journal: JournalWriter) -> float | None:
        """Apply the policy's decision to a run that has no live attempt."""
        now = time.time()
        ask = partial(_room_at, history, self.paths) if not restarts.may_come(history) else None
        fits = Feasibility.of(history).allows
        decision = decide(history, ask, now=now, fits=fits)
        if ask is not None:
            decision = successors.prefer(history, decision, ask, fits)
        number = history.last_asked.number if history.last_asked else 0
        due_s = _due_s(history, decision, now, self._absences.seconds(number, 0))
        if decision.action == "relaunch" and due_s <= 0:
            if text := restarts.prepare(history, decision, journal, now):
                self._warn_once(text, "the next attempt waits: %s", text)
                return min(history.spec.supervision.poll_s, SOON_S)
            decision = self._if_possible(history, decision)
        # The reason quotes evidence, and is written to the journal, the request and Prefect.
        decision = replace(decision, reason=self.redactor.text(decision.reason))
        self._record(history, decision, journal)
        poll_s = history.spec.supervision.poll_s
        if decision.action == "stop":
            self._record_end(decision, journal)
        if decision.action != "relaunch" or due_s > successors.DELAY_S_MAX:
            is_gone = restarts.release(history, decision.reason, journal)
            if decision.action == "stop":
                return None if is_gone else poll_s
        if decision.action == "wait" or due_s > 0:
            return min(poll_s, due_s) if due_s > 0 else poll_s
        self.submit(
            self.paths,
            gpus=decision.gpus,
            reason=decision.reason,
            exclude=decision.exclude,
            place=decision.place,
            seen=history.newest_order,
        )
        return min(poll_s, SOON_S)

    def _if_possible(self, history: RunHistory, decision: Decision) -> Decision:
        """Record the next attempt's secrets and return `decision`; return a wait if that fails.

        A run that needs a newer version waits for a supervisor of that version.
        """
        if problem := run_folders.why_not_submitted(history.record):
            return Decision(action="wait", reason=problem)
        try:
            secrets.record(self.paths, refresh=False)
        except errors.SecretError as error:
            return Decision(action="wait", reason=f"secrets have no value: {error}")
        return decision

    def _record(self, history: RunHistory, decision: Decision, journal: JournalWriter) -> None:
        """Journal a decision, unless it equals the last one."""
        facts: dict[str, Any] = {
            "action": decision.action,
            "gpus": decision.gpus,
            "exclude": list(decision.exclude),
            "reason": decision.reason,
        }
        if history.spec.resources.fallbacks:
            facts["place"] = decision.place
        before = history.last_decision or {}
        if any(before.get(key) != value for key, value in facts.items()):
            last = history.last_asked.number if history.last_asked else 0
            journal.append(
                EventKind.DECISION, after_attempt=last, delay_s=decision.delay_s, **facts
            )
            is_first = decision.action == "relaunch" and history.last_attempt is None
            self.log.info("%s: %s", "submit" if is_first else decision.action, decision.reason)

    def _record_end(self, decision: Decision, journal: JournalWriter) -> None:
        history = load_tallied(self.paths)
        last = history.last_asked.number if history.last_asked else 0
        ends = [e for e in history.events if e.kind is EventKind.RUN_ENDED]
        facts: dict[str, Any] = {"state": history.state, "after_attempt": last}
        if ends and facts.items() <= ends[-1].data.items():
            return
        journal.append(EventKind.RUN_ENDED, reason=decision.reason, **facts)

    def _finish(self) -> RunHistory | None:
        """Stop supervising, and return the last history; None if the run needs this supervisor.

        The lock of the orders is held while the run is read and the supervisor's lock is released.
        So an order either prevents the leave, or its command sees that there is no supervisor.
        """
        self._ingestion.finish()
        if self.is_acting:
            self._deliveries.finish(load_tallied(self.paths))
        try:
            with open_orders(self.paths):
                history = load_tallied(self.paths)
                if self.is_acting and not self.is_leaving and history.state.is_live:
                    return None
                self._lock.release()
        except (errors.RunConflictError, OSError) as error:
            self._warn_once("leave", "the run has ended, but its orders are locked: %s", error)
            return None
        if not self.is_leaving:
            secrets.forget(self.paths)
        return history

    def _warn_once(self, topic: str, text: str, *values: object) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self.log.warning(text, *values)


def _end_by_order(attempt: AttemptPaths, journal: JournalWriter, why: str) -> bool:
    """End an attempt that has no job, because of an order; return False if a job claimed it."""
    return attempts.end_unsubmitted(
        attempt,
        journal,
        state=AttemptState.CANCELLED,
        cause=Cause.OPERATOR,
        evidence=why,
    )


def _room_at(history: RunHistory, paths: RunPaths, place: int) -> Room | None:
    """Return the room for the next attempt at a place. Raises `SchedulerUnavailableError`."""
    resources = history.spec.resources.at(place)
    executor = executor_for(resources.executor)
    return executor.room(resources, attempts.gpus_held_after_end(executor, paths, history))


def _due_s(history: RunHistory, decision: Decision, now: float, waited_s: float = 0.0) -> float:
    """Return the seconds until the decision takes effect. Its delay starts at the attempt's end.

    A supervisor that restarts in between therefore does not wait longer. A node wrote the end by
    its clock, so the time at which this side noticed it counts, and `waited_s`, the seconds for
    which this supervisor has known it. The result is never longer than the delay.
    """
    last = history.last_asked
    began = (last.facts.get("noticed_at") or last.ended_at or now) if last else now
    passed_s = max(now - began, waited_s, 0.0)
    return max(0.0, decision.delay_s - passed_s)
