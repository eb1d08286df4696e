"""The Prefect flow `train`: supervise one run over all of its attempts.

Prefect schedules and displays the flow, but holds no state of the run. A flow run with the same
parameters, started by hand, by an automation or after a crash, continues from the state on disk.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote
from uuid import UUID

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import Pause
from prefect.runtime import deployment as current_deployment
from prefect.runtime import flow_run as current_flow_run
from prefect.states import Cancelled, Running, Suspended

from holdfast.contracts import errors
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.environment import PAGE_URL, problem_with_address
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.spec.run_spec import steps_total
from holdfast.contracts.states import AttemptState, Cause, RunState
from holdfast.flows import blocks, deployments, flow_run_states
from holdfast.flows.parameters import SpecParameter
from holdfast.flows.prefect_events import PREFECT, PrefectEvents
from holdfast.flows.supervisor import cancellation, carry, secrets, submission, summary
from holdfast.flows.supervisor.redactor import Log, Redactor
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.nodes.heartbeats import newest_step, read_heartbeats
from holdfast.workers.runs import operator, run_folders
from holdfast.workers.runs.preflight import check

# The link between a run and the Prefect flow run that supervises it, in both directions.
#
# The flow run's state says what the run does, and its artifacts show the run. A pause that someone
# asks of Prefect becomes a request to pause the run. A thread does all of this, so that a Prefect
# server that is down delays nothing.

# What people see of a run in Prefect: the name of its flow run's state, and its artifacts.
#
# This module does not use Prefect.

_QUEUED: Final = frozenset({AttemptState.CREATED, AttemptState.SUBMITTED, AttemptState.PENDING})


@dataclass(frozen=True)
class Artifact:
    """An artifact of the flow run: its kind in Prefect, and its content."""

    kind: str
    data: Any
    description: str = ""


def state_name(history: RunHistory) -> str:
    """Return what the run does now: Running, AwaitingCapacity, Flushing, Preempted or Paused.

    `Finishing` is the time from the last step's ending to the end of the run, and `Waiting` that
    until the policy's next decision after another ending.
    """
    last = history.last_attempt
    if last is None or last.state.is_terminal:
        if history.state is RunState.PAUSED:
            return "Paused"
        if last is None:
            return "AwaitingCapacity"
        if last.state is AttemptState.COMPLETED:
            return "Finishing"
        return "Preempted" if last.cause is Cause.PREEMPTION else "Waiting"
    if last.state in _QUEUED:
        return "AwaitingCapacity"
    return "Flushing" if last.state is AttemptState.STOPPING or _is_stopping(history) else "Running"


def _is_stopping(history: RunHistory) -> bool:
    """Return whether the running launch was told to end, and has not ended."""
    last, told = history.last_attempt, False
    for event in history.events:
        if last is not None and event.data.get("attempt") == last.number:
            if event.kind is EventKind.SIGNAL:
                told = True
            elif event.kind is EventKind.LAUNCH_STARTED:
                told = False
    return told


def artifacts(history: RunHistory) -> Iterator[tuple[str, Artifact]]:
    """Yield the artifacts of a run, by the ends of their keys."""
    step, total, text = _progress(history)
    if total:
        yield "progress", Artifact("progress", 100.0 * min(step / total, 1.0), text)
    rows = [
        dict(zip(summary.HEADINGS, map(_cell, summary.cells(one)), strict=True))
        for one in history.attempts
    ]
    yield "attempts", Artifact("table", json.dumps(rows), "The attempts of the run")
    yield "run", Artifact("markdown", _markdown(history, text), "Progress, links and lineage")


def _cell(text: str) -> str:
    """Return the text of a cell. Prefect shows it as Markdown, in which a dash begins a list."""
    return "" if text in {"-", "-–-"} else text


def _progress(history: RunHistory) -> tuple[int, int, str]:
    """Return the newest step, the number of steps (0: unknown), and both in words."""
    last = history.last_attempt
    # A new attempt has no step until its ranks train.
    known = (view.last_step for view in reversed(history.attempts))
    step = next((one for one in known if one is not None), 0)
    pace_s = 0.0
    if last is not None and not last.state.is_terminal:
        beats = read_heartbeats(history.paths.attempt(last.number))
        step = newest_step(beats) or step
        paces = [rank.step_time_s for beat in beats for rank in beat.ranks]
        pace_s = max((one for one in paces if one), default=0.0)
    total = steps_total(history.spec.config) or 0
    text = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    if pace_s and total > step:
        hours, minutes = divmod(round((total - step) * pace_s / 60), 60)
        text += f", about {hours} h {minutes:02d} min left at the present pace"
    return step, total, text


def _markdown(history: RunHistory, progress: str) -> str:
    paths = history.paths
    problem = problem_with_address(PAGE_URL, os.environ)
    page = "" if problem else os.environ.get(PAGE_URL, "").rstrip("/")
    name = f"[{paths.name}]({page}/runs/{quote(paths.name)})" if page else f"`{paths.name}`"
    lines = [f"# Run {name}", "", f"{history.state.value}: {progress}", ""]
    lines += [summary.describe_progress(history).text, "", f"Folder: `{paths.directory}`", ""]
    lines += [f"No links to the page: {problem}", ""] if problem else []
    if history.attempts:
        logs = paths.attempt(history.attempts[-1].number).directory
        lines += [f"Logs of the newest attempt: `holdfast logs {paths.name}`, in `{logs}`", ""]
    lineage = [f"- {line}" for line in _lineage(history)] or ["No checkpoints yet."]
    lines += ["## Lineage", ""]
    if history.tally.committed > len(history.tally.recent):
        newest = counted(len(history.tally.recent), "checkpoint")
        lines += [f"The newest {newest}; `holdfast lineage {paths.name}` shows all.", ""]
    return "\n".join([*lines, *lineage, ""])


def _lineage(history: RunHistory) -> Iterator[str]:
    """Yield a line for each attempt that wrote or resumed from one of the newest checkpoints.

    Prefect's pages draw no graphs. `holdfast lineage` and the web UI do.
    """
    kept = history.tally.recent
    names = {one.checkpoint for one in kept}
    for view in history.attempts:
        own = [one.checkpoint for one in kept if one.attempt == view.number]
        came_from = (view.resumed_from or "").rpartition(":")[2]
        if not own and came_from not in names:
            continue
        start = f", resumed from `{view.resumed_from}`" if view.resumed_from else ""
        wrote = f": {', '.join(f'`{name}`' for name in own)}" if own else ""
        yield f"attempt {view.number} ({counted(view.world_size, 'rank')}){start}{wrote}"


LOOK_S: Final = 3.0
ARTIFACTS_S: Final = 30.0
END_S_MAX: Final = 20.0
# The message of the state that a link gives a flow run whose run is paused.
RUN_IS_PAUSED: Final = "The run is paused"


class FlowRunLink:
    """Links the run at `paths` and the flow run with the id `flow_run`, until it is closed."""

    def __init__(self, paths: RunPaths, flow_run: str, log: Log, redactor: Redactor) -> None:
        self._paths, self._id, self._log, self._redactor = paths, UUID(flow_run), log, redactor
        self._history: RunHistory | None = None
        self._ended, self._changed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._shown: tuple[object, ...] = ()
        self._shown_for_s = 0.0
        self._artifacts: dict[str, UUID] = {}
        self._is_paused_there = self._is_tagged = False
        self._has_failed = False
        # Whether the flow run is suspended, so that Prefect starts another process to resume it.
        self.is_suspended = False

    def look(self, history: RunHistory) -> bool:
        """Take a newer history; return whether this process should end.

        It should while the run is paused and Prefect can start another process to resume it.
        """
        before, self._history = self._history, history
        if before is not None and state_name(before) != state_name(history):
            # The thread shows the change now, not at its next look.
            self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        return history.state is RunState.PAUSED and self.is_suspended

    def close(self) -> None:
        """Show the run once more, and stop."""
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(END_S_MAX)

    def leave(self) -> None:
        """End the process of a suspended flow run. Raises `Pause`, and `ServiceError`.

        If the run continues meanwhile, Prefect starts another process.
        """
        # A request may have come after the last look, and found a supervisor that was leaving, see
        # decision 69.
        if load_tallied(self._paths).state is not RunState.PAUSED:
            with deployments.open_client() as client:
                client.resume_flow_run(self._id)
        raise Pause("the run is paused", state=Suspended(message=RUN_IS_PAUSED))

    def _work(self) -> None:
        while not self._ended.is_set():
            self._try(self._synchronize)
            self._changed.wait(LOOK_S)
            self._changed.clear()
        self._try(self._show)

    def _try(self, work: Callable[[], object]) -> None:
        """Call `work`. Errors are logged once until it succeeds again."""
        try:
            work()
            self._has_failed = False
        # Whatever the error, it must not end the thread: the next look tries again.
        except Exception as error:
            if not self._has_failed:
                self._log.warning("Prefect does not show the run for now: %s", error)
            self._has_failed = True

    def _synchronize(self) -> None:
        history = self._history
        assert history is not None, "the thread starts with a history"
        with deployments.open_client() as client:
            found = client.read_flow_run(self._id)
            state = found.state
            if state is None or state.is_final() or state.is_cancelling():
                return
            self._tag(client, found)
            # The link's own message tells this pause from a person's. Without it, the run would be
            # paused again after it continues, see decision 69.
            if state.type is StateType.PAUSED and state.message == RUN_IS_PAUSED:
                self._stay_paused(client)
            elif state.type is StateType.PAUSED:
                self._follow_pause(found, state)
            elif history.state is RunState.PAUSED and not self._is_paused_there:
                self._pause_there(client, found)
            elif history.state is RunState.PAUSED:
                self._is_paused_there = False
                self._request("resume", history, found)
            else:
                self._is_paused_there = self.is_suspended = False
                self._name(client, state, state_name(history))
            self._show_in(client, history)

    def _tag(self, client: SyncPrefectClient, found: FlowRun) -> None:
        """Give the flow run the run's name as a tag, which Prefect's lists show and find."""
        if not self._is_tagged and self._paths.name not in found.tags:
            client.update_flow_run(self._id, tags=[*found.tags, self._paths.name])
        self._is_tagged = True

    def _stay_paused(self, client: SyncPrefectClient) -> None:
        """Leave the flow run suspended, as a link has made it, until the run continues."""
        self._is_paused_there = self.is_suspended = True
        # The supervisor's last look may be older than the pause, or than a request to resume.
        if load_tallied(self._paths).state is not RunState.PAUSED:
            client.resume_flow_run(self._id)

    def _follow_pause(self, found: FlowRun, state: State[Any]) -> None:
        """Pause the run, because someone has paused its flow run."""
        self._is_paused_there = True
        self.is_suspended = bool(state.state_details.pause_reschedule)
        # The supervisor's last look may be older than a request that was made here.
        history = load_tallied(self._paths)
        asked = history.pending_request
        if history.state is not RunState.PAUSED and not (asked and asked["action"] == "pause"):
            self._request("pause", history, found)

    def _pause_there(self, client: SyncPrefectClient, found: FlowRun) -> None:
        """Suspend the flow run, because the run is paused.

        One that Prefect cannot start again, or that only follows the run's supervisor, stays and
        says that the run is paused.
        """
        history = load_tallied(self._paths)
        if history.state is not RunState.PAUSED:
            return
        # Nobody would start it again, or another flow run is the one to suspend.
        if found.deployment_id is None or cancellation.last_supervisor(self._paths) != str(
            self._id
        ):
            assert found.state is not None, "it was looked at before"
            self._name(client, found.state, state_name(history))
            return
        client.set_flow_run_state(self._id, Suspended(message=RUN_IS_PAUSED))
        self._is_paused_there = self.is_suspended = True

    def _request(self, action: operator.Action, history: RunHistory, found: FlowRun) -> None:
        """Ask for `action`, unless someone gave an order since `history` was read."""
        # `seen` refuses the request if an order came since, so an old pause cannot undo a new
        # resume.
        facts: dict[str, Any] = {
            "by": flow_run_states.of_flow_run(found.name),
            "seen": history.newest_order,
        }
        if action == "pause":
            facts["reason"] = self._redactor.text(flow_run_states.message_of(found.state))
        try:
            message = operator.request(self._paths, action, writer=submission.JOURNAL, **facts)
            self._log.info("%s", message)
        except errors.HoldfastError as error:
            self._log.warning("Prefect's request to %s the run is refused: %s", action, error)

    def _name(self, client: SyncPrefectClient, state: State[Any], name: str) -> None:
        if state.type is StateType.RUNNING and state.name != name:
            client.set_flow_run_state(self._id, Running(name=name))

    def _show(self) -> None:
        with deployments.open_client() as client:
            self._show_in(client, load_tallied(self._paths), is_last=True)

    def _show_in(
        self, client: SyncPrefectClient, history: RunHistory, *, is_last: bool = False
    ) -> None:
        """Create or update the artifacts, if the run has changed or `ARTIFACTS_S` have passed."""
        self._shown_for_s += LOOK_S
        progress = summary.recorded_progress(history)
        if not is_last and progress == self._shown and self._shown_for_s < ARTIFACTS_S:
            return
        for end, artifact in artifacts(history):
            self._write(client, f"holdfast-{history.record.uid[:12]}-{end}", artifact)
        self._shown, self._shown_for_s = progress, 0.0

    def _write(self, client: SyncPrefectClient, key: str, artifact: Artifact) -> None:
        text = self._redactor.text
        data = text(artifact.data) if isinstance(artifact.data, str) else artifact.data
        facts = {"data": data, "description": text(artifact.description)}
        if key in self._artifacts:
            client.update_artifact(self._artifacts[key], ArtifactUpdate(**facts))
            return
        asked = ArtifactCreate(key=key, type=artifact.kind, flow_run_id=self._id, **facts)
        self._artifacts[key] = client.create_artifact(asked).id


def take_up_requests(paths: RunPaths, flow_run: str, log: Log) -> None:
    """Ask for what a person wanted who resumed or retried this flow run.

    A flow run that was resumed resumes its paused run. A flow run that was retried relaunches its
    run, if that has failed or was cancelled. Without an answer of Prefect, nothing is asked.
    """
    history = load_tallied(paths)
    # Another flow run supervises the run now. This one only follows it.
    if cancellation.last_supervisor(paths) != flow_run:
        return
    try:
        with deployments.open_client() as client:
            states = client.read_flow_run_states(UUID(flow_run))
    except errors.ServiceError as error:
        # The run needs its supervisor in any case.
        log.warning("Prefect does not say why this flow run was started again: %s", error)
        return
    before = flow_run_states.state_before_scheduling(states)
    if before is None:
        return
    action: operator.Action
    if before.is_paused() and history.state is RunState.PAUSED:
        action = "resume"
    elif before.is_final() and history.state in {RunState.FAILED, RunState.CANCELLED}:
        action = "relaunch"
    else:
        return
    by, seen = flow_run_states.of_flow_run(current_flow_run.name or flow_run), history.newest_order
    try:
        log.info("%s", operator.request(paths, action, by=by, writer=submission.JOURNAL, seen=seen))
    except errors.OrdersChangedError as error:
        log.warning("Prefect's request to %s the run is dropped: %s", action, error)


@task(
    name="submit attempt",
    task_run_name="attempt, GPUs: {gpus}",
    retries=0,
    # A relaunch with the same arguments is another attempt, so results must not be cached.
    cache_policy=NO_CACHE,
    persist_result=False,
)
def submit_attempt(
    paths: RunPaths,
    *,
    gpus: int,
    reason: str,
    exclude: Sequence[str],
    place: int = 0,
    seen: int | None = None,
) -> AttemptPaths:
    """Submit one attempt. It is a task so that Prefect's UI shows it; Prefect never retries it."""
    redactor = Redactor()
    record = read_document(RunRecord, paths.spec)
    if record is not None:
        redactor.learn(record.spec, paths)
    with redactor.errors():
        return submission.submit_next(
            paths, gpus=gpus, reason=reason, exclude=exclude, place=place, seen=seen
        )


@flow(
    name="train", retries=0, on_cancellation=[cancellation.cancel_run_of_flow], persist_result=False
)
def train(
    spec: SpecParameter = None,
    overrides: list[str] | None = None,
    root: str | None = None,
    run: str | None = None,
    preflight: bool = True,
    by: str | None = None,
) -> dict[str, Any] | State[Any]:
    """Supervise a run until its end and return its summary.

    Raises `RunFailedError` if the run failed, and `SpecError` for a wrong spec. A cancelled run
    returns the state Cancelled.

    Args:
        spec: What to run: a run spec, or the absolute path of one. Not needed with `run`.
        overrides: Keys of the spec to change, such as `resources.nodes=2`.
        root: The folder that contains the runs. By default that of the worker's environment.
        run: The folder name of an existing run, to resume its supervision.
        preflight: Whether checks run before the first attempt is queued.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    redactor = Redactor()
    log = redactor.log(get_run_logger())
    home = cancellation.home_of(root)
    with redactor.errors(), Index() as index:
        if spec is None:
            if run is None or overrides:
                raise errors.SpecError(
                    "spec: nothing given; expected a run spec, the path of one, or run"
                )
            return supervise_here(run_folders.find_run(home, run), index, redactor)
        run_spec = carry.given_spec(spec, overrides or (), home, run)
        if root is None and run is None:
            home = blocks.root_of(run_spec.blocks.storage) or home
        redactor.learn(run_spec.given)
        if (again := _own_run(home, run_spec.name)) is not None:
            return supervise_here(again, index, redactor)
        if not carry.is_under_way(home, run_spec, run):
            index.open()
            # A run that is under way was checked before, and its program may have changed since.
            if preflight:
                check(run_spec, home)
            known = run_folders.own_generation(home, run_spec.name) if run is None else None
            for warning in secrets.require(
                run_spec, known if run is None else RunPaths(home / run)
            ):
                log.warning("%s", warning)
        return supervise_here(
            carry.take_up(run_spec, home, run, by=flow_run_states.giver(by)), index, redactor
        )


def _own_run(root: Path, name: str) -> RunPaths | None:
    """Return the run that this flow run supervised before it was started again, or None."""
    paths = run_folders.own_generation(root, name)
    if paths is None or not current_flow_run.id:
        return None
    return paths if cancellation.last_supervisor(paths) == str(current_flow_run.id) else None


def supervise_here(
    paths: RunPaths, index: Index, redactor: Redactor
) -> dict[str, Any] | State[Any]:
    """Supervise the run in the current flow run, as `train` does, and return the same."""
    log, flow_run = redactor.log(get_run_logger()), str(current_flow_run.id or "")
    link = None
    if flow_run and deployments.api_url():
        link = FlowRunLink(paths, flow_run, log, redactor)
        take_up_requests(paths, flow_run, log)
    supervisor = Supervisor(
        paths=paths,
        index=index,
        log=log,
        submit=submit_attempt,
        flow_run=flow_run,
        redactor=redactor,
        services={PREFECT: _events(paths, redactor)},
        companion=link,
    )
    try:
        # The order follows the signal: a cancellation by Prefect becomes the run's own.
        with cancellation.cancel_on_signal(paths, supervisor, log):
            history = supervisor.run()
        # After the supervisor has released its lock, see decision 69.
        if link is not None and supervisor.is_leaving:
            link.leave()
    finally:
        if link is not None:
            link.close()
    return conclude(history, log, redactor)


def _events(paths: RunPaths, redactor: Redactor) -> PrefectEvents:
    return PrefectEvents(
        load_tallied(paths).record,
        redactor,
        flow_run=str(current_flow_run.id or ""),
        deployment=str(current_deployment.id or ""),
    )


def conclude(history: RunHistory, log: Log, redactor: Redactor) -> dict[str, Any] | State[Any]:
    """Log how the run ended, and return its summary, or the state Cancelled, to Prefect."""
    summary.log_end(history, redactor.log(log))
    reason = redactor.text(summary.end_reason(history))
    if history.state is RunState.COMPLETED:
        return summary.summarize(history, reason)
    if history.state is RunState.CANCELLED:
        return Cancelled(message=f"{history.paths.name}: {reason}")
    raise errors.RunFailedError(f"{history.paths.name} {history.state}: {reason}")
