"""Prefect flows of operators: what the commands of the same names do, by schedule or automation.

Each works on the runs on disk, and can be started again after any crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run as current_flow_run

from holdfast.contracts.disk.paths import LATEST, RunPaths
from holdfast.contracts.disk.visits import Visit, own_runs, visit
from holdfast.contracts.errors import DamagedCheckpointError, RunFailedError, SpecError
from holdfast.contracts.records.checkpoint_choice import choose_checkpoint
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.records.supervision import is_supervised
from holdfast.contracts.states import RunState
from holdfast.flows import secrets
from holdfast.flows.givers import cancelled_by, giver
from holdfast.flows.spec_form import SpecParameter, SpecTable
from holdfast.flows.start import start_if_alone
from holdfast.flows.supervisor.cancellation import (
    cancel_run_of_flow,
    find_cancelling,
    find_supervised,
    last_supervisor,
)
from holdfast.flows.supervisor.redactor import Redactor
from holdfast.flows.supervisor.submission import JOURNAL
from holdfast.flows.sweep import Sweep, members_of
from holdfast.flows.train import home_of, supervise_here, train
from holdfast.lineage.index import Index
from holdfast.workers.checkpoints import exports, pruning, verification
from holdfast.workers.runs import operator
from holdfast.workers.runs.run_folders import find_run, require_own
from holdfast.workers.runs.until_capacity import ready_runs, waits_for_capacity

Answer = dict[str, Any] | State[Any]


@flow(name="submit", on_cancellation=[cancel_run_of_flow], persist_result=False)
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


@flow(name="relaunch", on_cancellation=[cancel_run_of_flow], persist_result=False)
def relaunch(
    run: str, gpus: int | None = None, root: str | None = None, by: str | None = None
) -> Answer:
    """Continue a run in a new attempt, and supervise it. A live run saves a checkpoint first.

    Args:
        run: The run's folder name, or its name in the spec.
        gpus: GPUs of the next attempt. By default as many as before.
        root: The folder that contains the runs. By default that of the worker's environment.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    paths = find_run(home_of(root), run)
    secrets.require_again(paths)
    # A flow run that is started again, such as after a pause, has asked already.
    if last_supervisor(paths) != str(current_flow_run.id):
        message = operator.request(paths, "relaunch", by=giver(by), gpus=gpus, writer=JOURNAL)
        get_run_logger().info("%s", message)
    return _supervise(paths)


@flow(name="supervise", on_cancellation=[cancel_run_of_flow], persist_result=False)
def supervise(
    run: str | None = None, flow_run: str | None = None, root: str | None = None
) -> Answer:
    """Take up a run that has lost its supervisor. A run that has ended is left as it is.

    Args:
        run: The run's folder name, or its name in the spec.
        flow_run: Instead of `run`, the id of the flow run that supervised it.
        root: The folder that contains the runs. By default that of the worker's environment.
    """
    log, home = get_run_logger(), home_of(root)
    if (run is None) == (flow_run is None):
        raise SpecError(f"run={run}, flow_run={flow_run}: expected one of the two")
    # A flow run that is started again, such as after a pause, continues its own run.
    if (own := find_supervised(home, str(current_flow_run.id))) is not None:
        return _supervise(own)
    paths = find_run(home, run) if run else find_supervised(home, flow_run or "")
    if paths is None:
        log.info("flow run %s supervised no run under %s", flow_run, home)
        return {"run": None, "state": None}
    history = load_tallied(paths)
    if not history.state.is_live or is_supervised(paths.flow_lock):
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
    paths = find_run(home_of(root), run)
    directory = verification.directory_to_verify(paths, choose_checkpoint(paths, checkpoint))
    facts = verification.verify(directory)
    verification.record(directory, facts, by=giver(by), writer=JOURNAL)
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
    log, home, pruner = get_run_logger(), home_of(root), giver(by)

    def prune_one(paths: RunPaths) -> dict[str, Any]:
        facts = pruning.prune(paths, by=pruner, writer=JOURNAL, dry_run=dry_run)
        for one in facts["deleted"]:
            log.info("%s:%s: %s", paths.name, one["checkpoint"], one["reason"])
        return facts

    if run is not None:
        found, unreadable = [find_run(home, run)], {}
    else:
        seen = list(visit(own_runs(home), load_tallied))
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
    to: exports.Form = exports.Form.SAFETENSORS,
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
    paths = find_run(home_of(root), run)
    name = choose_checkpoint(paths, checkpoint)
    directory = verification.directory_to_verify(paths, name)
    return exports.export(directory, exports.Form(to), Path(output), writer=JOURNAL)


@flow(name="drill", persist_result=False)
def drill(
    run: str, count: int = 6, seed: int = 0, kinds: list[str] | None = None, root: str | None = None
) -> dict[str, Any]:
    """Inject faults into a run that is training, and check the invariants after each.

    Args:
        run: The run's folder name, or its name in the spec.
        count: The number of faults.
        seed: The seed for the order and times of the faults.
        kinds: The kinds of faults. By default all that are possible on a live run.
        root: The folder that contains the runs. By default that of the worker's environment.
    """
    from holdfast.flows.drills.kinds import select_kinds
    from holdfast.flows.drills.runner import drill_live

    log = get_run_logger()
    paths = find_run(home_of(root), run)
    require_own(paths)
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
    log, home, resumer = get_run_logger(), home_of(root), giver(by)
    chosen = [find_run(home, run)] if run else ready_runs(home)

    def resume_one(paths: RunPaths) -> None:
        secrets.require_again(paths)
        history = load_tallied(paths)
        if not (run or waits_for_capacity(history)):
            log.info("%s: another order came meanwhile", paths.name)
            return
        seen = None if run else history.newest_order
        message = operator.request(paths, "resume", by=resumer, writer=JOURNAL, seen=seen)
        log.info("%s", message)
        start_if_alone(paths)

    resumed = list(visit(chosen, resume_one))
    _raise_failures(resumed, "not resumed")
    return {"resumed": [one.paths.name for one in resumed]}


@flow(name="sweep", persist_result=False)
def sweep(
    spec: SpecParameter,
    variants: dict[str, list[str]],
    gpus: int,
    root: str | None = None,
    by: str | None = None,
) -> dict[str, Any]:
    """Run variants of a spec, as many at a time as a quota of GPUs allows.

    Each run has a flow run of its own. A sweep that is started again continues its runs.

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
        many = Sweep(members, home_of(root), gpus, log, by=giver(by))
        try:
            done = many.run()
        except TerminationSignal:
            if (found := find_cancelling(str(current_flow_run.id or ""))) is not None:
                many.cancel(*cancelled_by(found))
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
