"""Start the consumers of a run's checkpoints, and follow each start to its end.

Only the supervisor does this, while it holds the run's flow lock. Each step is a journal line
first, so the next supervisor continues where a killed one stopped: it adopts what runs, starts
again what was lost, and starts nothing twice, because a start is claimed exclusively.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.contracts import errors
from holdfast.contracts.disk import durable, manifest
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import MANIFEST, ConsumerPaths, RunPaths
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.records import documents, known_damage, reported
from holdfast.contracts.records.consumers import (
    ConsumerOrder,
    ConsumerOutcome,
    ConsumerState,
    Use,
    open_uses,
    read_metrics,
    uses_in,
)
from holdfast.contracts.records.history import (
    RunHistory,
    excluded_checkpoints,
    pinned_checkpoints,
)
from holdfast.contracts.spec.consumers import Consumer
from holdfast.contracts.spec.keep_rules import ranked
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.checkpoints.trainer_call import NEUTRAL_FOLDER
from holdfast.workers.decisions import consumers
from holdfast.workers.nodes.processes import ProcessName, end_processes, find_process, is_alive
from holdfast.workers.nodes.setup_lines import after_setup
from holdfast.workers.runs.request import consumer_request, working_directory_of
from holdfast.workers.schedulers import executor_for

PROCESS: Final = "holdfast.workers.checkpoints.consumer_process"
# A process that was started claims its start within this time, or never runs.
CLAIM_S: Final = 60.0
# How long the outcome of a process that has ended may take to appear on another host.
OUTCOME_S: Final = 10.0
# How long a job may take to end after its process.
STATE_S: Final = 60.0
_AFTER_A_SIGNAL: Final = frozenset(
    {AttemptState.PREEMPTED, AttemptState.COMPLETED, AttemptState.FAILED}
)
# Beyond its own time limits, a process that does not end is killed after this.
STUCK_S: Final = 600.0


@dataclass(frozen=True)
class ConsumerTurn:
    """What one turn did. With `is_open`, a consumer works or is due; `messages` are for the log.

    With `has_new`, checkpoints became due, and with `has_closed`, some are no longer needed. The
    history of this turn does not know either yet.
    """

    is_open: bool
    has_new: bool
    has_closed: bool
    messages: tuple[str, ...]


@dataclass
class Consumers:
    """The consumers of one run, as its supervisor sees them."""

    paths: RunPaths
    _seen: tuple[object, ...] = ()
    # Processes of this supervisor, and when (monotonic) it began to wait for a part of a start.
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _since: dict[tuple[int, str], float] = field(default_factory=dict)
    _messages: list[str] = field(default_factory=list)

    def tend(self, history: RunHistory, journal: JournalWriter) -> ConsumerTurn:
        """Find what is due, follow what works, and start what may start.

        Raises `SchedulerUnavailableError` if the scheduler does not answer.
        """
        uses = uses_in(history.lines.of_kinds(EventKind.CONSUMER))
        wanted = {one.name: one for one in history.spec.on}
        self._messages = []
        before = [key for key, one in uses.items() if one.state.is_open]
        has_new = self._find_due(history, uses, journal)
        self._reap()
        for use in [one for one in uses.values() if one.state is ConsumerState.STARTED]:
            self._follow(use, wanted.get(use.consumer), uses, journal)
        for use in consumers.find_startable(open_uses(uses), time.time()):
            self._start(history, use, wanted.get(use.consumer), uses, journal)
        is_open = any(one.state.is_open for one in uses.values())
        has_closed = not all(uses[key].state.is_open for key in before)
        return ConsumerTurn(is_open, has_new, has_closed, tuple(self._messages))

    # What is due.

    def _find_due(
        self, history: RunHistory, uses: dict[tuple[str, str], Use], journal: JournalWriter
    ) -> bool:
        """Journal what has become due since the last turn; return whether something has."""
        lines = history.lines
        kinds = (EventKind.PINNED, EventKind.UNPINNED, EventKind.METRIC, EventKind.ROLLED_BACK)
        # A line from a machine whose clock is behind is as new as any other.
        changes = [event.time for event in lines.of_kinds(*kinds)]
        ended = sum(one.state.is_terminal for one in history.attempts)
        seen = (history.tally.committed, len(changes), sum(changes), ended, history.state)
        if seen == self._seen:
            return False
        due = consumers.find_due(history.spec.on, self._look(history, uses), uses)
        for one in due:
            use = Use(one.consumer, one.checkpoint, ConsumerState.DUE, 0, 0, one.step, time.time())
            self._write(use, uses, journal)
        self._seen = seen
        return bool(due)

    def _look(
        self, history: RunHistory, uses: Mapping[tuple[str, str], Use]
    ) -> consumers.CheckpointEvents:
        """Return what has happened to the run's checkpoints."""
        events = history.events
        left_out = {*excluded_checkpoints(events), *known_damage.damaged_checkpoints(events)}
        known = {name for _, name in uses}
        committed = [
            (str(name), name.step)
            for name in self.paths.list_checkpoint_names()
            if str(name) not in left_out and (str(name) in known or self._is_there(str(name)))
        ]
        commits = history.tally.commits
        preempted = [
            commits[one.number].branch_name
            for one in history.attempts
            if one.cause is Cause.PREEMPTION and one.number in commits
        ]
        is_over = not history.state.is_live and bool(committed)
        return consumers.CheckpointEvents(
            committed=committed,
            pinned=pinned_checkpoints(events),
            best=self._best(history, committed),
            preempted=preempted,
            ended=committed[-1][0] if is_over else "",
        )

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(self.paths.checkpoint(name) / MANIFEST)

    def _best(self, history: RunHistory, committed: list[tuple[str, int]]) -> str:
        rule = history.spec.checkpoint.keep.best
        if rule is None or not any(one.event == "best" for one in history.spec.on):
            return ""
        manifests = []
        for name, _ in committed:
            with contextlib.suppress(errors.HoldfastError, OSError):
                if (found := manifest.read_manifest(self.paths.checkpoint(name))) is not None:
                    manifests.append(found)
        order = ranked(reported.with_reported(manifests, history.events), rule.metric, rule.mode)
        return order[0][1] if order else ""

    # A start.

    def _start(
        self,
        history: RunHistory,
        use: Use,
        consumer: Consumer | None,
        uses: dict[tuple[str, str], Use],
        journal: JournalWriter,
    ) -> None:
        """Start a consumer: reserve its number, write what it runs, journal it, and start it."""
        if consumer is None or not self._is_there(use.checkpoint):
            why = "the checkpoint was deleted" if consumer else "the spec has no such consumer"
            self._write(_with(use, ConsumerState.GIVEN_UP, reason=why), uses, journal)
            return
        paths = self._reserve()
        order = _order_of(history, use, consumer)
        documents.write_document(paths.order, order)
        request = None
        if consumer.job is not None:
            cluster = executor_for(history.spec.resources.executor).cluster()
            request = consumer_request(
                history, consumer, paths.number, created_at=time.time(), cluster=cluster
            )
            documents.write_document(paths.request, request)
        started = _with(use, ConsumerState.STARTED, start=paths.number, tries=use.tries + 1)
        # The line comes first: a supervisor that is killed now finds it, and no process.
        self._write(started, uses, journal)
        try:
            if request is not None:
                submission = executor_for(request.executor).submit_consumer(paths, request)
                documents.write_document(paths.submission, submission)
            else:
                self._processes[paths.number] = self._spawn(history, paths, consumer)
        except errors.SchedulerUnavailableError:
            # It may have been accepted. The next turn looks for it.
            raise
        except (errors.SchedulerError, OSError) as error:
            self._close(paths, f"it was not started: {error}")

    def _reserve(self) -> ConsumerPaths:
        durable.make_directory(self.paths.consumers)
        number = self.paths.newest_consumer() + 1
        while True:
            paths = self.paths.consumer(number)
            try:
                paths.directory.mkdir()
            except FileExistsError:
                number += 1
                continue
            durable.fsync_directory(self.paths.consumers)
            return paths

    def _spawn(
        self, history: RunHistory, paths: ConsumerPaths, consumer: Consumer
    ) -> subprocess.Popen[bytes]:
        """Start the process that runs a consumer on this machine, in a separate session."""
        launch = history.spec.launch
        setup = after_setup("launch.setup", launch.setup)
        python = [*launch.wrapper, *setup, launch.python or sys.executable]
        if consumer.deployment is not None:
            # The supervisor's Python has Prefect. That of the run needs none.
            python = [sys.executable]
        with (paths.directory / "process.log").open("ab") as log:
            return subprocess.Popen(
                [*python, "-m", PROCESS, str(paths.order)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=NEUTRAL_FOLDER,
            )

    # A start that works.

    def _reap(self) -> None:
        """Let the processes that have ended go, so that none remains as a zombie."""
        for process in self._processes.values():
            process.poll()

    def _follow(
        self,
        use: Use,
        consumer: Consumer | None,
        uses: dict[tuple[str, str], Use],
        journal: JournalWriter,
    ) -> None:
        """Journal the end of a start, if it has ended."""
        paths = self.paths.consumer(use.start)
        try:
            outcome = documents.read_document(ConsumerOutcome, paths.outcome)
            if outcome is None:
                order = documents.read_document(ConsumerOrder, paths.order)
                claim = documents.read_document(documents.Claim, paths.claim)
                outcome = self._lost(paths, order, claim)
            is_preempted = outcome is not None and self._was_preempted(paths, outcome)
        except errors.SchedulerUnavailableError:
            raise
        except errors.HoldfastError as error:
            outcome = ConsumerOutcome.failed(f"its records cannot be read: {error}")
            is_preempted = False
        if outcome is not None and is_preempted is not None:
            # A preemption is not a failure, and does not count as a try.
            use = replace(use, tries=use.tries - is_preempted)
            self._end(use, consumer, outcome, uses, journal)

    def _was_preempted(self, paths: ConsumerPaths, outcome: ConsumerOutcome) -> bool | None:
        """Return whether the scheduler preempted a job, or None while that is unknown.

        A job that ends by itself after the signal of a preemption does not end as preempted.
        """
        request = documents.read_document(documents.Request, paths.request)
        submission = documents.read_document(documents.Submission, paths.submission)
        if outcome.ending == "done" or request is None or submission is None:
            return False
        executor = executor_for(request.executor)
        state = executor.status(request, submission, since=outcome.ended_at).state
        if state is not None and state.is_terminal:
            was_stopped = outcome.ending == "stopped"
            return state in (_AFTER_A_SIGNAL if was_stopped else {AttemptState.PREEMPTED})
        return None if self._waited(paths.number, "state") < STATE_S else False

    def _lost(
        self, paths: ConsumerPaths, order: ConsumerOrder | None, claim: documents.Claim | None
    ) -> ConsumerOutcome | None:
        """Return the outcome of a start that cannot write it any more, or None."""
        if order is None:
            return self._close(paths, "its order is missing")
        why = self._lost_job(paths, claim) if order.is_job else self._lost_process(paths, claim)
        if not why and claim is not None:
            limit_s = 2 * order.timeout_s + STUCK_S
            if self._waited(paths.number, "end") > limit_s:
                _kill(claim)
                why = f"it did not end within {limit_s:.0f} s"
        return self._close(paths, why) if why else None

    def _lost_process(self, paths: ConsumerPaths, claim: documents.Claim | None) -> str:
        """Return why a process of this machine will never write an outcome, or ''."""
        if claim is None:
            own = self._processes.get(paths.number)
            has_ended = own is not None and own.poll() is not None
            if not has_ended and self._waited(paths.number, "claim") < CLAIM_S:
                return ""
            return f"it did not start; see {paths.directory / 'process.log'}"
        if claim.host != socket.gethostname():
            # Its processes cannot be seen from here. It ends by its own time limit.
            return ""
        name = ProcessName(claim.pid, claim.process_start_s, claim.boot_id)
        if is_alive(name) or self._waited(paths.number, "outcome") < OUTCOME_S:
            return ""
        return "its process ended without a record, as when it is killed"

    def _lost_job(self, paths: ConsumerPaths, claim: documents.Claim | None) -> str:
        """Return why a job will never write an outcome, or ''."""
        request = documents.read_document(documents.Request, paths.request)
        if request is None:
            return "its request is missing"
        executor = executor_for(request.executor)
        submission = documents.read_document(documents.Submission, paths.submission)
        if submission is None:
            submission = executor.find(request)
            if submission is None:
                is_late = self._waited(paths.number, "submission") > executor.absence_s
                return "the scheduler does not have its job" if is_late else ""
            documents.write_document(paths.submission, submission)
        status = executor.status(request, submission)
        if not status.has_ended:
            return ""
        # A job that Slurm has forgotten may still run.
        late_s = executor.absence_s if status.is_absent else OUTCOME_S
        if claim is not None and self._waited(paths.number, "outcome") < late_s:
            return ""
        return "; ".join(status.evidence) or f"its job is {status.raw}"

    def _close(self, paths: ConsumerPaths, why: str) -> ConsumerOutcome | None:
        """End a start in the place of its process; return the outcome that counts.

        The claim comes first. A process that starts late finds it and runs nothing.
        """
        claim = documents.read_document(documents.Claim, paths.claim)
        if claim is None and not documents.create_document(paths.claim, documents.Claim.closed()):
            # It started at this moment.
            return None
        if documents.create_document(paths.outcome, found := ConsumerOutcome.failed(why)):
            return found
        return documents.read_document(ConsumerOutcome, paths.outcome)

    def _waited(self, number: int, what: str) -> float:
        """Return the seconds since this supervisor first waited for something of a start."""
        now = time.monotonic()
        return now - self._since.setdefault((number, what), now)

    def _end(
        self,
        use: Use,
        consumer: Consumer | None,
        outcome: ConsumerOutcome,
        uses: dict[tuple[str, str], Use],
        journal: JournalWriter,
    ) -> None:
        """Journal what a start reported, and then how it ended."""
        is_done, reason = outcome.ending == "done", outcome.reason
        if is_done:
            try:
                metrics = read_metrics(self.paths.consumer(use.start))
                if metrics:
                    facts = {"by": use.consumer, "consumer": use.consumer}
                    reported.report(self.paths, use.checkpoint, metrics, journal=journal, **facts)
            except errors.SpecError as error:
                is_done, reason = False, str(error)
        state = consumers.state_after(consumer, use.tries, is_done=is_done)
        self._write(_with(use, state, reason=reason), uses, journal)
        self._processes.pop(use.start, None)
        for key in [one for one in self._since if one[0] == use.start]:
            del self._since[key]

    def _write(self, use: Use, uses: dict[tuple[str, str], Use], journal: JournalWriter) -> None:
        journal.append(
            EventKind.CONSUMER,
            consumer=use.consumer,
            checkpoint=use.checkpoint,
            step=use.step,
            state=str(use.state),
            start=use.start,
            tries=use.tries,
            reason=use.reason,
        )
        uses[use.consumer, use.checkpoint] = use
        if use.state is not ConsumerState.DUE:
            why = f": {use.reason}" if use.reason else ""
            text = f"consumer {use.consumer} of {use.checkpoint}: {use.state.words}{why}"
            self._messages.append(plain_line(text))


def _with(use: Use, state: ConsumerState, *, reason: str = "", **changes: Any) -> Use:
    return replace(use, state=state, at=time.time(), reason=reason, **changes)


def _order_of(history: RunHistory, use: Use, consumer: Consumer) -> ConsumerOrder:
    return ConsumerOrder(
        consumer=consumer.name,
        checkpoint=use.checkpoint,
        step=use.step,
        command=consumer.command or (),
        deployment=consumer.deployment,
        parameters=consumer.parameters,
        working_directory=working_directory_of(history.record, history.spec),
        export=consumer.export,
        timeout_s=60.0 * consumer.timeout_min,
        tries=use.tries + 1,
        is_job=consumer.job is not None,
        created_at=time.time(),
    )


def _kill(claim: documents.Claim) -> None:
    """Kill the process of a claim, if it is one of this machine."""
    if claim.host == socket.gethostname():
        process = find_process(ProcessName(claim.pid, claim.process_start_s, claim.boot_id))
        if process is not None:
            end_processes([process])
