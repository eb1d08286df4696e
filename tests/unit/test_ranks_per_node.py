"""`resources.nproc_per_node`: ranks and GPUs are counted apart, from the spec to the account."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.histories import attempt_of, history_of, record_of, spec_of

from holdfast.contracts.account.timeline import spans_of
from holdfast.contracts.records.documents import Request
from holdfast.contracts.spec.resources import NodeShare, share_of
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.health.checks import READY, HealthChecks
from holdfast.workers.agent.launch.command import build_command, build_environment
from holdfast.workers.decisions.growth import observe_capacity
from holdfast.workers.decisions.policy import decide
from holdfast.workers.decisions.sizes import allowed_sizes, problem_with
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers.slurm_capacity import gpus_that_fit

# Two ranks on each GPU, one rank for eight GPUs, and CPU ranks.
SHARED = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4, "nproc_per_node": 8}
WHOLE = {"executor": "slurm", "nodes": 2, "gpus_per_node": 8, "nproc_per_node": 1}
CPU = {"executor": "slurm", "nodes": 2, "gpus_per_node": 0, "nproc_per_node": 4}


def request_of(resources: dict[str, Any], gpus: int | None = None, **fields: Any) -> Request:
    spec = spec_of(resources=resources, **fields)
    size = gpus or spec.gpus
    return build_request(record_of(spec), spec, attempt=1, gpus=size, reason="test")


@pytest.mark.parametrize(
    ("resources", "gpus", "asked", "ranks", "world_size"),
    [
        (SHARED, 8, 4, 8, 16),
        (SHARED, 4, 4, 8, 8),
        (SHARED, 3, 3, 6, 6),
        (WHOLE, 16, 8, 1, 2),
        (WHOLE, 8, 8, 1, 1),
        (CPU, 8, None, 4, 8),
        (CPU, 2, None, 2, 2),
    ],
)
def test_slurm_is_asked_for_gpus_and_torchrun_for_ranks(
    resources: dict[str, Any], gpus: int, asked: int | None, ranks: int, world_size: int
) -> None:
    request = request_of(resources, gpus, elastic={"min_gpus": min(gpus, 8)})
    assert request.scheduler.get("gpus_per_node") == asked
    assert "gres" not in request.scheduler
    command = build_command(request, node=0, launch=1, address="n1", port=1, logs=Path("/logs"))
    assert f"--nproc-per-node={ranks}" in command
    assert f"--nnodes={world_size // ranks}" in command
    assert (request.world_size, request.size) == (world_size, gpus)


def test_a_request_of_an_older_version_has_one_rank_per_gpu() -> None:
    document = request_of({"gpus_per_node": 3}).model_dump(mode="json")
    del document["nproc_per_node"]
    request = Request.model_validate(document)
    assert (request.ranks_per_node, request.world_size) == (3, 3)


@pytest.mark.parametrize(
    ("resources", "elastic", "message"),
    [
        ({"gpus_per_node": 0}, {}, "needs resources.nproc_per_node"),
        ({"nproc_per_node": 0}, {}, "greater than or equal to 1"),
        (WHOLE, {"choices": [4, 16]}, "4 GPUs: a part of a node that has 8 GPUs"),
        (WHOLE, {"min_gpus": 4}, "no whole number"),
        (WHOLE, {"on_preemption": [2]}, "no whole number"),
        ({**SHARED, "nproc_per_node": 6}, {"choices": [1, 8]}, "1 GPU: a part"),
        (CPU, {"choices": [6, 8]}, "6 ranks do not fill nodes of 4"),
        ({**CPU, "gres": "gpu:2"}, {}, "'gpu:2', which asks for GPUs"),
        ({**CPU, "gpu_type": "h100"}, {}, "'h100', which asks for GPUs"),
        ({**SHARED, "gres": "none"}, {}, "set gpus_per_node = 0 and leave gres out"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_reason(
    resources: dict[str, Any], elastic: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(resources=resources, elastic=elastic)


@given(
    size=st.integers(1, 512),
    gpus=st.integers(0, 16),
    ranks=st.one_of(st.none(), st.integers(1, 64)),
)
def test_a_share_keeps_the_ratio_or_is_refused(size: int, gpus: int, ranks: int | None) -> None:
    per_node = gpus or ranks or 1
    try:
        share = share_of(size, gpus, ranks)
    except ValueError:
        is_part = size < per_node and size * (ranks or per_node) % per_node
        assert is_part or (size > per_node and size % per_node)
        return
    assert share.nodes * (share.gpus if gpus else share.ranks) == size
    assert share.ranks * per_node * share.nodes == size * (ranks or per_node)


def test_a_relaunch_uses_only_counts_with_whole_ranks() -> None:
    spec = spec_of(
        resources={**SHARED, "nproc_per_node": 6}, elastic={"min_gpus": 2, "max_gpus": 12}
    )
    assert allowed_sizes(spec) == (2, 4, 8, 12)
    assert "no whole number" in str(problem_with(spec, 3))
    assert [spec.ranks(size) for size in allowed_sizes(spec)] == [3, 6, 12, 18]
    assert [spec.size_of(ranks) for ranks in (3, 6, 12, 5, 7)] == [2, 4, 8, None, None]


def test_a_preempted_run_continues_at_the_gpus_that_are_free() -> None:
    spec = spec_of(resources=SHARED, elastic={"min_gpus": 2, "max_gpus": 8})
    history = history_of(spec, attempt_of(spec, 1, Cause.PREEMPTION, committed=5))
    assert decide(history, 5, now=1_000_000.0).gpus == 4
    # Without an answer of the scheduler, the count of GPUs stays, and not that of the ranks.
    assert decide(history, None, now=1_000_000.0).gpus == 8


def test_a_run_grows_from_its_gpus_and_not_from_its_ranks() -> None:
    spec = spec_of(
        resources={**SHARED, "nodes": 1}, elastic={"min_gpus": 4, "max_gpus": 8, "grow": True}
    )
    last = attempt_of(spec, 1, None, gpus=4, state=AttemptState.RUNNING)
    history = history_of(spec, last)
    seen = observe_capacity(history, 8, None, now=1.0, fits=lambda _: True)
    assert seen is not None
    assert seen.gpus == 8


def test_free_gpus_are_counted_in_gpus_and_cpu_ranks_are_not_limited() -> None:
    assert gpus_that_fit([4, 4, 1], spec_of(resources=SHARED).resources) == 8
    assert gpus_that_fit([0, 0], spec_of(resources=CPU).resources) is None


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (SHARED, 4),
        (WHOLE, 8),
        (CPU, 0),
        ({**SHARED, "nproc_per_node": None, "gres": "gpu:2"}, 2),
        ({**SHARED, "nproc_per_node": None, "gres": "none"}, 0),
        ({**SHARED, "nproc_per_node": None, "gres": "craynetwork:1"}, 0),
        ({"gpus_per_node": 4}, 0),
    ],
)
def test_the_check_ready_expects_the_gpus_that_slurm_gives(
    resources: dict[str, Any], expected: int
) -> None:
    attempt = SimpleNamespace(directory=Path("/run/attempts/0001"))
    context: Any = SimpleNamespace(request=request_of(resources), attempt=attempt)
    assert f"--gpus={expected}" in HealthChecks(context)._command(READY)


@pytest.mark.parametrize(
    ("resources", "cpus", "threads"),
    [
        ({**SHARED, "cpus_per_gpu": 6}, 24, "3"),
        ({**WHOLE, "cpus_per_gpu": 6}, 48, "48"),
        ({**CPU, "cpus_per_gpu": 6}, 24, "6"),
        (SHARED, None, "1"),
    ],
)
def test_cpus_follow_the_gpus_and_threads_the_ranks(
    resources: dict[str, Any], cpus: int | None, threads: str
) -> None:
    request = request_of(resources)
    assert request.scheduler.get("cpus_per_task") == cpus
    run = SimpleNamespace(directory=Path("/r"))
    context: Any = SimpleNamespace(request=request, run=run, node=0, nodes=2)
    handles: Any = SimpleNamespace(status_table="b", flusher="f")
    assert build_environment(context, 1, handles, {}, {})["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        (SHARED, 8),
        (WHOLE, 16),
        (CPU, 0),
        ({**WHOLE, "gres": "gpu:h100:8"}, 16),
        ({**SHARED, "nproc_per_node": None, "gres": "none"}, 0),
        ({"gpus_per_node": 3}, 3),
    ],
)
def test_gpu_hours_count_the_gpus_that_an_attempt_held(
    resources: dict[str, Any], gpus: int
) -> None:
    spec = spec_of(resources=resources)
    history = history_of(spec, attempt_of(spec, 1, Cause.PREEMPTION, committed=5))
    assert [span.gpus for span in spans_of(history)] == [gpus]


def test_a_whole_spec_survives_its_record() -> None:
    spec = spec_of(resources=CPU)
    assert RunSpec.read(spec.model_dump(mode="json")) == spec
    assert spec.share(8) == NodeShare(2, 0, 4)
