"""Build an attempt's submission from a run's spec, as plain data and without side effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.contracts.disk.digests import command_digest
from holdfast.contracts.records.documents import Provenance, Request, RunRecord
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.spec.consumers import Consumer
from holdfast.contracts.spec.part import RECORDED
from holdfast.contracts.spec.resources import NO_GRES, NodeShare, Resources
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.sections import Supervision
from holdfast.workers.decisions.exclusions import excluded_hosts

# The agent plans its own stop, so Slurm's warning is requested this much earlier.
WARNING_MARGIN_S: Final = 30
# Slurm may send the warning up to a minute early, plus the resolution of its clock.
WARNING_EARLY_S: Final = 90
# The time until an agent handles signals; an earlier signal would end the job.
AGENT_START_S: Final = 60
LOCAL_TIMEOUT_MIN: Final = 10 * 365 * 24 * 60
UNKNOWN: Final = Provenance()
# The job of a consumer may last this much longer than its command, for its start and its end.
CONSUMER_MIN: Final = 5
# The sbatch option by which a successor waits for the attempt's job.
DEPENDENCY: Final = "dependency"
# Only the supervisor submits, so Slurm must not requeue. After a node failure, the other nodes'
# agents still have the state to save.
NOT_REQUEUED: Final = {"no-requeue": True, "no-kill": True}
# With `--no-kill`, a node failure would not end the job, and Slurm would not restart it. The other
# nodes' agents get `KillWait` to save. See decision 99.
EXPEDITED: Final = {"requeue": "expedite"}


def job_name(run: str, run_uid: str, kind: Literal["a", "s", "c"], number: int) -> str:
    """Return the scheduler's name for a job, by which any process can find it.

    It is that of an attempt ("a"), of a successor ("s"), whose name an attempt keeps that runs in
    it, or of a start of a consumer of a checkpoint ("c").
    """
    return f"holdfast-{run}-{run_uid[:8]}-{kind}{number:04d}"


def as_successor(request: Request, number: int, after_job: str) -> Request:
    """Return the request of successor `number`, which starts when the job `after_job` has ended."""
    options = {**request.scheduler["additional_parameters"], DEPENDENCY: f"afterany:{after_job}"}
    named = run_by(request, number)
    scheduler = {**named.scheduler, "additional_parameters": options}
    return named.model_copy(update={"scheduler": scheduler})


def run_by(request: Request, number: int) -> Request:
    """Return the request of an attempt that successor `number` runs, or with 0 its own job."""
    kind: Literal["a", "s"] = "s" if number else "a"
    name = job_name(request.run, request.run_uid, kind, number or request.attempt)
    scheduler = {**request.scheduler, "job_name": name}
    return request.model_copy(
        update={"job_name": name, "successor": number, "restart_of": 0, "scheduler": scheduler}
    )


def as_restart(request: Request, before: Request) -> Request:
    """Return the request of an attempt that runs in the job of the attempt before it.

    Slurm has restarted that job, which keeps its id and name.
    """
    scheduler = {**request.scheduler, "job_name": before.job_name}
    facts = {"job_name": before.job_name, "restart_of": before.attempt, "scheduler": scheduler}
    return request.model_copy(update=facts)


def differences(successor: Request, request: Request) -> list[str]:
    """Return in what a successor's job differs from the job that `request` asks for.

    The nodes that it excludes can still be changed while it waits.
    """
    one, other = (_job_of(each) for each in (successor, request))
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _job_of(request: Request) -> dict[str, Any]:
    """Return what makes a job: its command and the parameters that the scheduler gets."""
    given = request.model_dump(mode="json")
    scheduler = dict(given["scheduler"])
    options = dict(scheduler.pop("additional_parameters", {}))
    options.pop(DEPENDENCY, None)
    for name in ("job_name", "exclude"):
        scheduler.pop(name, None)
    keys = ("executor", "cluster", "nodes", "gpus_per_node", "nproc_per_node", "place")
    launch = {f"launch.{name}": given["launch"][name] for name in ("python", "wrapper")}
    options = {f"option {name}": value for name, value in options.items()}
    return {**scheduler, **options, **launch, **{key: given[key] for key in keys}}


def build_request(
    record: RunRecord,
    spec: RunSpec,
    *,
    attempt: int,
    gpus: int,
    reason: str,
    exclude: Sequence[str] = (),
    created_at: float = 0.0,
    cluster: str | None = None,
    place: int = 0,
    hangs_before: int = 0,
    provenance: Provenance = UNKNOWN,
    expedite: bool = False,
) -> Request:
    """Return the request for attempt number `attempt` of a run on `gpus` GPUs.

    `created_at` is Unix seconds, or 0 for a dry run. `cluster` is the Slurm cluster that gets the
    job, None if unknown. `place` is n for the n-th fallback, else 0. With `expedite`, Slurm
    restarts the job after a node failure. Raises `ValueError` if `gpus` does not fill whole nodes
    of the spec.
    """
    spec = spec.model_copy(update={"resources": spec.resources.at(place)})
    share = spec.share(gpus)
    name = job_name(record.run, record.uid, "a", attempt)
    directory = Path(record.root) / record.run
    working_directory = working_directory_of(record, spec)
    parameters = (
        _slurm_parameters(spec, name, share, exclude, expedite=expedite)
        if spec.resources.executor == "slurm"
        else _local_parameters(share)
    )
    facts = {
        "run_uid": record.uid,
        "run": record.run,
        "run_directory": str(directory),
        "attempt": attempt,
        "job_name": name,
        "executor": spec.resources.executor,
        "nodes": share.nodes,
        "spare_nodes": spec.resources.spares_beside(share.nodes),
        "gpus_per_node": share.gpus,
        "nproc_per_node": share.ranks,
        "cluster": cluster,
        "exclude": tuple(exclude),
        "place": place,
        "expedite": expedite,
        "command": spec.command,
        "working_directory": working_directory,
        "environment": spec.environment,
        "config": spec.config,
        "launch": spec.launch,
        "program": spec.program,
        "resources": spec.resources,
        "supervision": spec.supervision,
        "health": spec.health,
        "checkpoint": spec.checkpoint,
        "command_digest": command_digest(spec.command, working_directory),
        "scheduler": parameters,
        "created_at": created_at,
        "hangs_before": hangs_before,
        "reason": reason,
        "provenance": provenance,
        "sources": spec.sources,
    }
    # A recorded spec must stay readable, so the rules for new specs do not apply here.
    return Request.model_validate(facts, context=RECORDED)


def consumer_request(
    history: RunHistory,
    consumer: Consumer,
    number: int,
    *,
    created_at: float,
    cluster: str | None,
) -> Request:
    """Return the request for the job of start `number` of a consumer. It belongs to no attempt."""
    job, spec = consumer.job, history.spec
    assert job is not None
    # An export has the same time again.
    limit_min = math.ceil(consumer.timeout_min * (2 if consumer.export else 1)) + CONSUMER_MIN
    own = {
        "executor": spec.resources.executor,
        "gpus_per_node": job.gpus,
        "nproc_per_node": None if job.gpus else 1,
        "memory_gb_per_node": job.memory_gb,
        "partition": job.partition or spec.resources.partition,
        "account": job.account or spec.resources.account,
        "qos": job.qos or spec.resources.qos,
        "gpu_type": spec.resources.gpu_type if job.gpus else None,
        "gres": NO_GRES if spec.resources.gres == NO_GRES else None,
        "time_limit_min": limit_min,
        "extra": {**spec.resources.extra, **job.extra},
    }
    # A spec that was recorded stays valid, so no rule for new specs applies.
    resources = Resources.model_validate(own, context=RECORDED)
    request = build_request(
        history.record,
        spec.model_copy(update={"resources": resources}),
        attempt=0,
        gpus=resources.size_per_node,
        reason=f"consumer {consumer.name}",
        exclude=excluded_hosts(history.attempts, created_at),
        created_at=created_at,
        cluster=cluster,
    )
    name = job_name(request.run, request.run_uid, "c", number)
    scheduler = {**request.scheduler, "job_name": name}
    if job.cpus:
        scheduler["cpus_per_task"] = job.cpus
        scheduler["srun_args"] = [*scheduler["srun_args"], f"--cpus-per-task={job.cpus}"]
    return request.model_copy(update={"job_name": name, "scheduler": scheduler})


def working_directory_of(record: RunRecord, spec: RunSpec) -> str:
    """Return the directory the program runs in: the original folder, or the run's copy of it."""
    if spec.launch.code == "snapshot":
        return str(Path(record.root) / record.run / "code")
    return spec.launch.working_directory


def _local_parameters(share: NodeShare) -> dict[str, Any]:
    """Return submitit's parameters for the local executor; the agent enforces the time limit."""
    return {
        "timeout_min": LOCAL_TIMEOUT_MIN,
        "tasks_per_node": 1,
        "gpus_per_node": share.gpus,
    }


def _slurm_parameters(
    spec: RunSpec, name: str, share: NodeShare, exclude: Sequence[str], *, expedite: bool
) -> dict[str, Any]:
    """Return submitit's parameters for Slurm: one task per node, which is the agent.

    `time` is None if the spec has no limit, because submitit's own default is 5 minutes.
    """
    resources = spec.resources
    warning_s = warning_lead_s(spec.supervision, resources)
    cpus = (resources.cpus_per_gpu or 0) * (share.gpus or share.ranks)
    # The spec does not accept these names in `resources.extra`.
    options: dict[str, Any] = {
        **resources.extra,
        **(EXPEDITED if expedite else NOT_REQUEUED),
        "signal": f"USR2@{warning_s}",
    }
    # A failing node must not end the other nodes' agents, which still hold the state.
    step = ["--no-kill", "--kill-on-bad-exit=0"]
    if cpus:
        step.append(f"--cpus-per-task={cpus}")
    if spec.launch.export == "none":
        # Otherwise the step would not get the variables of the batch script either.
        options["export"] = "NONE"
        step.append("--export=ALL")
    wanted: dict[str, Any] = {
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "exclude": ",".join(exclude) or None,
        "cpus_per_task": cpus or None,
        "mem": _megabytes(resources.memory_gb_per_node),
        "mem_per_cpu": _megabytes(resources.memory_gb_per_cpu),
        "setup": list(spec.launch.setup) or None,
        **_gpu_parameter(resources, share.gpus),
    }
    return {
        "job_name": name,
        "nodes": share.nodes + resources.spares_beside(share.nodes),
        "ntasks_per_node": 1,
        "time": resources.time_limit_min,
        "signal_delay_s": warning_s,
        # submitit would set its own key, which sites that check these keys refuse.
        "wckey": None,
        **{key: value for key, value in wanted.items() if value is not None},
        "srun_args": [*step, *spec.launch.container, *spec.launch.srun],
        "additional_parameters": options,
    }


def warning_lead_s(supervision: Supervision, resources: Resources) -> int:
    """Return how many seconds before the end Slurm warns a job by USR2; 0 for no warning.

    A job that is too short gets no warning, because it might come before the agent handles
    signals. The agent knows its time limit anyway, and a preemption sends another signal.
    """
    lead_s = math.ceil(supervision.grace_s) + WARNING_MARGIN_S
    limit_min = resources.time_limit_min
    earliest_s = lead_s + WARNING_EARLY_S + AGENT_START_S
    return 0 if limit_min is not None and 60 * limit_min < earliest_s else lead_s


def _gpu_parameter(resources: Resources, gpus: int) -> dict[str, Any]:
    if resources.gres == NO_GRES:
        return {}
    if resources.gres:
        return {"gres": resources.gres}
    kind = resources.gpu_type
    return {"gpus_per_node": f"{kind}:{gpus}" if kind else gpus} if gpus else {}


def _megabytes(gigabytes: float | None) -> str | None:
    return f"{math.ceil(gigabytes * 1024)}M" if gigabytes else None
