"""Prefect flows of operators: what the commands of the same names do, by schedule or automation.

Each works on the runs on disk, and can be started again after any crash.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run as current_flow_run
from pydantic import Field

from holdfast.contracts.disk.paths import LATEST, RunPaths
from holdfast.contracts.disk.visits import Visit, own_runs, visit
from holdfast.contracts.errors import DamagedCheckpointError, RunFailedError, SpecError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records import checkpoint_choice, history_cache, supervision
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import RunState
from holdfast.contracts.version import require_bench_package
from holdfast.flows import flow_run_states, start
from holdfast.flows.parameters import SpecParameter, SpecTable, load_spec
from holdfast.flows.supervisor import cancellation, secrets, submission, summary
from holdfast.flows.supervisor.redactor import Log, Redactor
from holdfast.flows.train import supervise_here, train
from holdfast.lineage.index import Index
from holdfast.workers.checkpoints import deletion, exports, verification
from holdfast.workers.decisions.sizes import allowed_sizes
from holdfast.workers.runs import operator, run_folders, until_capacity
from holdfast.workers.runs.preflight import check

# Several runs under one quota of GPUs: each starts when the ones before leave it enough.
#
# The state is on disk: a sweep that is started again finds its runs and counts them. Each run has
# a separate supervisor, so the runs continue without the sweep. This module does not use
# Prefect.

POLL_S: Final = 5.0


@dataclass(frozen=True)
class Member:
    """A run of a sweep, and the most GPUs that it can hold at a time."""

    spec: RunSpec
    gpus: int


def members_of(
    spec: Mapping[str, Any] | str, variants: Mapping[str, Sequence[str]], gpus: int
) -> list[Member]:
    """Return the runs: for each variant, `spec` with its overrides, named after both.

    Raises `SpecError` for a wrong spec, and for a run that can hold more than the quota `gpus`.
    """
    if not variants:
        raise SpecError('variants: none given; expected {"small": ["environment.LR=0.1"], …}')
    base = load_spec(spec).name
    found = []
    for key, overrides in variants.items():
        own = load_spec(spec, [f"name={base}-{key}", *overrides])
        # The most that the run can hold at any time: growth must not exceed the quota.
        most = max(own.gpus, *allowed_sizes(own), *own.elastic.on_preemption)
        if most > gpus:
            raise SpecError(
                f"variant {key}: the run can hold {counted(most, 'GPU')}, and the quota is "
                f"{gpus}; lower "
                "resources or elastic.max_gpus, or raise the quota. Nothing was queued"
            )
        found.append(Member(own, most))
    return found


class Sweep:
    """The runs of a sweep under `root`, of which as many run as `gpus` GPUs allow.

    `by` is who started the sweep.
    """

    def __init__(
        self, members: Sequence[Member], root: Path, gpus: int, log: Log, *, by: str
    ) -> None:
        self._members, self._root, self._gpus, self._log = members, root, gpus, log
        self._by = by
        self._runs: dict[str, RunPaths] = {}
        self._told: dict[str, RunState] = {}
        self._started: set[str] = set()

    def run(self) -> dict[str, Any]:
        """Start the runs in order until all have ended; return their summaries.

        Raises the errors of the checks before a run, before any is created.
        """
        for member in self._members:
            if self._state(member) is None:
                check(member.spec, self._root)
                secrets.require(
                    member.spec, run_folders.own_generation(self._root, member.spec.name)
                )
        while waiting := self._turn():
            self._log.debug("%d runs have not ended", waiting)
            time.sleep(POLL_S)
        return {"gpus": self._gpus, "runs": [self._summary(one) for one in self._runs.values()]}

    def cancel(self, by: str, reason: str) -> None:
        """Cancel the runs that were started, after a last checkpoint of each."""
        for one in visit(self._runs.values(), partial(_cancel, by=by, reason=reason)):
            if one.error is not None:
                self._log.error("%s was not cancelled: %s", one.paths.name, one.reason)
            elif one.result:
                self._log.info("%s", one.result)

    def _turn(self) -> int:
        """Start what fits, and return how many runs have not ended."""
        held = unended = 0
        for member in self._members:
            state = self._state(member)
            if state is not None and not state.is_live:
                continue
            unended += 1
            if state is None and held + member.gpus > self._gpus:
                # A smaller run does not overtake, or a large one could wait for ever, see
                # decision 70.
                held = self._gpus
                continue
            # A paused run keeps its share, because an operator may resume it at any time.
            held += member.gpus
            if member.spec.name not in self._started:
                self._start(member)
        return unended

    def _state(self, member: Member) -> RunState | None:
        # From the folder, whichever process has died. A slot of Prefect would be free while its job
        # still holds the GPUs, see decision 70.
        name = member.spec.name
        paths = self._runs.get(name) or run_folders.own_generation(self._root, name)
        if paths is None or not run_folders.is_same_spec(
            run_folders.read_record(paths), member.spec
        ):
            return None
        self._runs[name] = paths
        state = history_cache.load_tallied(paths).state
        if self._told.get(name) is not state:
            self._told[name] = state
            self._log.info("%s: %s", paths.name, state)
        return state

    def _start(self, member: Member) -> None:
        paths, _ = run_folders.attach_or_create(member.spec, self._root, created_by=self._by)
        self._runs[member.spec.name] = paths
        started = start.start_if_alone(paths)
        # Once: a supervisor that Prefect has queued cannot be told from one that is missing.
        self._started.add(member.spec.name)
        self._log.info("%s has up to %d of %d GPUs", paths.name, member.gpus, self._gpus)
        if started.warning:
            self._log.warning("%s", started.warning)

    def _summary(self, paths: RunPaths) -> dict[str, Any]:
        history = history_cache.load_tallied(paths)
        return summary.summarize(history, summary.end_reason(history))


def _cancel(paths: RunPaths, *, by: str, reason: str) -> str:
    if not history_cache.load_tallied(paths).state.is_live:
        return ""
    return operator.request(paths, "cancel", by=by, reason=reason)


Answer = dict[str, Any] | State[Any]
# A form of Prefect refuses less.
Count = Annotated[int, Field(ge=1)]


@flow(name="submit", on_cancellation=[cancellation.cancel_run_of_flow], persist_result=False)
def submit(
    spec: SpecTable, root: str | None = None, preflight: bool = True, by: str | None = None
) -> Answer:
    """Start a run from a form, and supervise it until its end, as `train` does.

    Args:
        spec: What to run, and within which limits.
        root: The folder that contains the runs. By default that of the worker's environment.
        preflight: Whether checks run before the first attempt is queued.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    answer: Answer = train.fn(spec=spec, root=root, preflight=preflight, by=by)
    return answer


@flow(name="relaunch", on_cancellation=[cancellation.cancel_run_of_flow], persist_result=False)
def relaunch(
    run: str, gpus: Count | None = None, root: str | None = None, by: str | None = None
) -> Answer:
    """Continue a run in a new attempt, and supervise it. A live run saves a checkpoint first.

    Args:
        run: The run's folder name, or its name in the spec.
        gpus: GPUs of the next attempt. By default as many as before.
        root: The folder that contains the runs. By default that of the worker's environment.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    paths = run_folders.find_run(cancellation.home_of(root), run)
    secrets.require_again(paths)
    # A flow run that is started again, such as after a pause, has asked already.
    if cancellation.last_supervisor(paths) != str(current_flow_run.id):
        message = operator.request(
            paths, "relaunch", by=flow_run_states.giver(by), gpus=gpus, writer=submission.JOURNAL
        )
        get_run_logger().info("%s", message)
    return _supervise(paths)


@flow(name="supervise", on_cancellation=[cancellation.cancel_run_of_flow], persist_result=False)
def supervise(
    run: str | None = None, flow_run: str | None = None, root: str | None = None
) -> Answer:
    """Take up a run that has lost its supervisor. A run that has ended is left as it is.

    Args:
        run: The run's folder name, or its name in the spec.
        flow_run: Instead of `run`, the id of the flow run that supervised it.
        root: The folder that contains the runs. By default that of the worker's environment.
    """
    log, home = get_run_logger(), cancellation.home_of(root)
    if (run is None) == (flow_run is None):
        raise SpecError(f"run={run}, flow_run={flow_run}: expected one of the two")
    # A flow run that is started again, such as after a pause, continues its own run.
    if (own := cancellation.find_supervised(home, str(current_flow_run.id))) is not None:
        return _supervise(own)
    paths = (
        run_folders.find_run(home, run)
        if run
        else cancellation.find_supervised(home, flow_run or "")
    )
    if paths is None:
        log.info("flow run %s supervised no run under %s", flow_run, home)
        return {"run": None, "state": None}
    history = history_cache.load_tallied(paths)
    if not history.state.is_live or supervision.is_supervised(paths.flow_lock):
        why = "has a supervisor" if history.state.is_live else f"has ended: {history.state}"
        log.info("%s %s", paths.name, why)
        return {"run": paths.name, "state": history.state.value}
    return _supervise(paths)


@flow(name="verify", persist_result=False)
def verify(
    run: str, checkpoint: str = LATEST, root: str | None = None, by: str | None = None
) -> dict[str, Any]:
    """Read every byte of a checkpoint and compare it with the manifest. Damage fails the flow.

    Args:
        run: The run's folder name, or its name in the spec.
        checkpoint: The checkpoint's name, such as `step-00000100.a0001.l01`, or a word:
            `latest`, `best` or `step-100`.
        root: The folder that contains the runs. By default that of the worker's environment.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    paths = run_folders.find_run(cancellation.home_of(root), run)
    directory = verification.directory_to_verify(
        paths, checkpoint_choice.choose_checkpoint(paths, checkpoint)
    )
    facts = verification.verify(directory)
    verification.record(directory, facts, by=flow_run_states.giver(by), writer=submission.JOURNAL)
    if not facts["ok"]:
        raise DamagedCheckpointError(
            f"{facts['checkpoint']}: {'; '.join(facts['damaged'])}", facts["damaged"]
        )
    get_run_logger().info("%s: %d files, whole", facts["checkpoint"], facts["files"])
    return facts


@flow(name="prune", persist_result=False)
def prune(
    run: str | None = None, root: str | None = None, dry_run: bool = False, by: str | None = None
) -> dict[str, Any]:
    """Delete checkpoints that no keep rule, pin or use keeps. Their manifests remain.

    A run that cannot be read is reported. If deleting fails in a run, the others are pruned first.

    Args:
        run: The run's folder name, or its name in the spec. By default all runs of this user.
        root: The folder that contains the runs. By default that of the worker's environment.
        dry_run: Whether only to say what would be deleted.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    log, home, pruner = get_run_logger(), cancellation.home_of(root), flow_run_states.giver(by)

    def prune_one(paths: RunPaths) -> dict[str, Any]:
        facts = deletion.prune(paths, by=pruner, writer=submission.JOURNAL, dry_run=dry_run)
        for one in facts["deleted"]:
            log.info("%s:%s: %s", paths.name, one["checkpoint"], one["reason"])
        return facts

    if run is not None:
        found, unreadable = [run_folders.find_run(home, run)], {}
    else:
        seen = list(visit(own_runs(home), history_cache.load_tallied))
        found = [one.paths for one in seen if one.error is None]
        unreadable = {one.paths.name: one.reason for one in seen if one.error is not None}
    for name, reason in unreadable.items():
        log.warning("%s: not pruned: %s", name, reason)
    pruned = list(visit(found, prune_one))
    _raise_failures(pruned, "not pruned")
    facts = [one.result for one in pruned if one.result is not None]
    return {
        "runs": facts,
        "bytes_deleted": sum(one["bytes_deleted"] for one in facts),
        "unreadable": unreadable,
    }


@flow(name="export", persist_result=False)
def export(
    run: str,
    output: str,
    to: exports.ExportFormat = exports.ExportFormat.SAFETENSORS,
    checkpoint: str = LATEST,
    root: str | None = None,
) -> dict[str, Any]:
    """Write a checkpoint for programs without Holdfast.

    Args:
        run: The run's folder name, or its name in the spec.
        output: The absolute path to write. It must not exist.
        to: The format. torch and safetensors write a file, others a folder.
        checkpoint: The checkpoint's name, such as `step-00000100.a0001.l01`, or a word:
            `latest`, `best` or `step-100`.
        root: The folder that contains the runs. By default that of the worker's environment.
    """
    paths = run_folders.find_run(cancellation.home_of(root), run)
    name = checkpoint_choice.choose_checkpoint(paths, checkpoint)
    directory = verification.directory_to_verify(paths, name)
    return exports.export(
        directory, exports.ExportFormat(to), Path(output), writer=submission.JOURNAL
    )


@flow(name="drill", persist_result=False)
def drill(
    run: str,
    count: Count = 6,
    seed: int = 0,
    kinds: list[str] | None = None,
    root: str | None = None,
) -> dict[str, Any]:
    """Inject faults into a run that is training, and check the invariants after each.

    It needs the package holdfast-bench in the worker's environment.

    Args:
        run: The run's folder name, or its name in the spec.
        count: The number of faults.
        seed: The seed for the order and times of the faults.
        kinds: The kinds of faults. By default all that are possible on a live run.
        root: The folder that contains the runs. By default that of the worker's environment.
    """
    require_bench_package("a drill")
    from holdfast_bench.live_drills.kinds import select_kinds
    from holdfast_bench.live_drills.runner import drill_live

    log = get_run_logger()
    paths = run_folders.find_run(cancellation.home_of(root), run)
    run_folders.require_own(paths)
    chosen = select_kinds(kinds or [], is_live=True, missing=())
    result = drill_live(paths, chosen, count, seed, tell=lambda text: log.info("%s", text))
    if result.broken:
        raise RunFailedError("; ".join(f"{one.invariant}: {one.detail}" for one in result.broken))
    return result.as_json()


@flow(name="resume", persist_result=False)
def resume(
    run: str | None = None, root: str | None = None, by: str | None = None
) -> dict[str, Any]:
    """Continue paused runs, and start a supervisor for one that has none.

    If a run cannot continue, such as for a secret without a value, the others continue first.

    Args:
        run: The run's folder name, or its name in the spec. By default all runs that were paused
            until capacity returns, oldest first, as far as they fit on free GPUs.
        root: The folder that contains the runs. By default that of the worker's environment.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    log, home, resumer = get_run_logger(), cancellation.home_of(root), flow_run_states.giver(by)
    chosen = [run_folders.find_run(home, run)] if run else until_capacity.ready_runs(home)

    def resume_one(paths: RunPaths) -> None:
        secrets.require_again(paths)
        history = history_cache.load_tallied(paths)
        if not (run or until_capacity.waits_for_capacity(history)):
            log.info("%s: another order came meanwhile", paths.name)
            return
        seen = None if run else history.newest_order
        message = operator.request(
            paths, "resume", by=resumer, writer=submission.JOURNAL, seen=seen
        )
        log.info("%s", message)
        start.start_if_alone(paths)

    resumed = list(visit(chosen, resume_one))
    _raise_failures(resumed, "not resumed")
    return {"resumed": [one.paths.name for one in resumed]}


@flow(name="sweep", persist_result=False)
def sweep(
    spec: SpecParameter,
    variants: Annotated[dict[str, list[str]], Field(min_length=1)],
    gpus: Count,
    root: str | None = None,
    by: str | None = None,
) -> dict[str, Any]:
    """Run variants of a spec, as many at a time as a quota of GPUs allows.

    Each run has a separate flow run. A sweep that is started again continues its runs.

    Args:
        spec: What all runs have in common: a run spec, or the absolute path of one.
        variants: For each run, the end of its name and the keys of the spec to change, such as
            `{"small": ["environment.LR=0.1"]}`.
        gpus: The most GPUs that the runs may hold together.
        root: The folder that contains the runs. By default that of the worker's environment.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    if spec is None:
        raise SpecError("spec: nothing given; expected a run spec or the path of one")
    redactor = Redactor()
    log = redactor.log(get_run_logger())
    with redactor.errors():
        members = members_of(spec, variants, gpus)
        for member in members:
            redactor.learn(member.spec.given)
        many = Sweep(members, cancellation.home_of(root), gpus, log, by=flow_run_states.giver(by))
        try:
            done = many.run()
        except TerminationSignal:
            if (found := cancellation.find_cancelling(str(current_flow_run.id or ""))) is not None:
                many.cancel(*flow_run_states.cancelled_by(found))
            raise
    failed = [one["run"] for one in done["runs"] if one["state"] != RunState.COMPLETED]
    if failed:
        raise RunFailedError(f"not completed: {', '.join(failed)}; `holdfast show` says why")
    return done


def _raise_failures(visits: Sequence[Visit[Any]], what: str) -> None:
    """Raise the error of a single run, or `RunFailedError` with those of several."""
    if len(visits) == 1 and visits[0].error is not None:
        raise visits[0].error
    failed = [f"{one.paths.name}: {one.reason}" for one in visits if one.error is not None]
    if failed:
        raise RunFailedError(f"{what}: {'; '.join(failed)}")


def _supervise(paths: RunPaths) -> Answer:
    redactor = Redactor()
    with redactor.errors(), Index() as index:
        return supervise_here(paths, index, redactor)
