"""Requests: pure, printable, and with every option that keeps a job ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.histories import record_of, spec_of

from holdfast.contracts.attempt import Request
from holdfast.contracts.digests import command_digest
from holdfast.workers.agent.torchrun import build_environment
from holdfast.workers.request import LOCAL_TIMEOUT_MIN, build_request


def request_of(attempt: int = 1, gpus: int | None = None, **fields: Any) -> Request:
    spec = spec_of(**fields)
    return build_request(
        record_of(spec), spec, attempt=attempt, gpus=gpus or spec.gpus, reason="test"
    )


def slurm(**resources: Any) -> dict[str, Any]:
    given = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4, **resources}
    return {"resources": given}


def test_the_job_bears_the_attempts_name() -> None:
    assert request_of(attempt=12).job_name == "holdfast-r-uuuuuuuu-a0012"


def test_requests_are_equal_for_equal_questions_and_survive_json() -> None:
    one = request_of(**slurm())
    assert one == request_of(**slurm())
    assert Request.model_validate_json(one.model_dump_json()) == one


def test_a_slurm_job_is_never_requeued_and_outlives_a_node() -> None:
    parameters = request_of(**slurm(time_limit_min=30)).scheduler
    options = parameters["additional_parameters"]
    assert options["no-requeue"] is True
    assert options["no-kill"] is True
    assert options["signal"] == "USR2@60"
    assert "--no-kill" in parameters["srun_args"]
    assert "--kill-on-bad-exit=0" in parameters["srun_args"]
    assert parameters["ntasks_per_node"] == 1
    assert (parameters["nodes"], parameters["gpus_per_node"]) == (2, 4)
    assert parameters["time"] == 30


@pytest.mark.parametrize(("limit_min", "warning"), [(3, "USR2@0"), (4, "USR2@60")])
def test_a_job_too_short_for_a_warning_that_comes_early_gets_none(
    limit_min: int, warning: str
) -> None:
    parameters = request_of(**slurm(time_limit_min=limit_min)).scheduler
    assert parameters["additional_parameters"]["signal"] == warning


def test_without_a_limit_the_partition_decides() -> None:
    assert request_of(**slurm()).scheduler["time"] is None


@pytest.mark.parametrize(
    ("gres", "present", "absent"),
    [(None, "gpus_per_node", "gres"), ("gpu:h100:4", "gres", "gpus_per_node")],
)
def test_gpus_or_gres(gres: str | None, present: str, absent: str) -> None:
    parameters = request_of(**slurm(gres=gres)).scheduler
    assert present in parameters
    assert absent not in parameters


def test_cpu_nodes_ask_for_no_gpus() -> None:
    parameters = request_of(**slurm(gres="none")).scheduler
    assert not {"gres", "gpus_per_node"} & set(parameters)


def test_everything_a_person_may_ask_of_slurm_arrives() -> None:
    fields = slurm(
        partition="spot",
        account="lab",
        qos="low",
        constraint="h100",
        cpus_per_gpu=2,
        memory_gb_per_node=1.5,
        extra={"comment": "hi", "exclusive": True},
    )
    launch = {"setup": ["module load cuda"], "container": ["--container-image=x"], "srun": ["-v"]}
    spec = spec_of(**fields, launch=launch)
    request = build_request(
        record_of(spec), spec, attempt=1, gpus=8, reason="test", exclude=("n1", "n2")
    )
    got = request.scheduler
    assert (got["partition"], got["account"], got["qos"]) == ("spot", "lab", "low")
    assert (got["constraint"], got["cpus_per_task"], got["mem"]) == ("h100", 8, "1536M")
    assert got["exclude"] == "n1,n2"
    assert got["setup"] == ["module load cuda"]
    assert got["srun_args"][-2:] == ["--container-image=x", "-v"]
    assert "--cpus-per-task=8" in got["srun_args"]
    assert got["additional_parameters"]["comment"] == "hi"
    assert got["additional_parameters"]["exclusive"] is True


def test_a_local_job_has_practically_no_timeout() -> None:
    assert request_of().scheduler["timeout_min"] == LOCAL_TIMEOUT_MIN


@pytest.mark.parametrize(("gpus", "nodes", "per_node"), [(8, 2, 4), (4, 1, 4), (2, 1, 2)])
def test_fewer_gpus_are_cut_into_nodes(gpus: int, nodes: int, per_node: int) -> None:
    request = request_of(gpus=gpus, **slurm())
    assert (request.nodes, request.gpus_per_node) == (nodes, per_node)


def test_the_command_is_the_same_at_every_size() -> None:
    sizes = [request_of(gpus=g, **slurm()) for g in (2, 4, 8)]
    assert len({r.command_digest for r in sizes}) == 1
    assert sizes[0].command_digest == command_digest(("t.py",), ".")


def test_a_snapshot_runs_from_the_runs_folder() -> None:
    request = request_of(launch={"code": "snapshot", "working_directory": "/somewhere"})
    assert request.working_directory == "/srv/r/code"


def test_ranks_are_told_how_long_a_flush_may_take() -> None:
    request = request_of(supervision={"flush_timeout_s": 90})
    run = SimpleNamespace(directory="/r")
    context: Any = SimpleNamespace(request=request, run=run, node=0, nodes=1)
    handles: Any = SimpleNamespace(status_table="b", flusher="f")
    told = build_environment(context, 1, handles, {"HOLDFAST_FLUSH_TIMEOUT_S": "7"}, {})
    assert told["HOLDFAST_FLUSH_TIMEOUT_S"] == "90.0"
