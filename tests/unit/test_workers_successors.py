"""Successors: the job that waits, what becomes of it, and what its agent does until then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.histories import attempt_of, history_of, record_of, spec_of
from tests.support.runs import RunFolder

from holdfast.contracts.disk.paths import RunPaths, SuccessorPaths, folder_of
from holdfast.contracts.errors import SubmissionRefusedError
from holdfast.contracts.records.attempt import Request
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent import successor
from holdfast.workers.decisions.policy import Decision
from holdfast.workers.runs import successors
from holdfast.workers.runs.request import as_successor, build_request, differences, run_by
from holdfast.workers.schedulers.local import LocalExecutor

ON_SLURM = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4, "standby": "successor"}


def request_of(gpus: int = 8, **fields: Any) -> Request:
    spec = spec_of(resources={**ON_SLURM, **fields}, elastic={"choices": [4, 8]})
    return build_request(record_of(spec), spec, attempt=2, gpus=gpus, reason="test")


def test_a_successor_starts_after_the_job_and_has_a_name_of_its_own() -> None:
    one = as_successor(request_of(extra={"dependency": "afterok:7"}), 3, "101")
    options = one.scheduler["additional_parameters"]
    assert options["dependency"] == "afterany:101"
    assert options["no-requeue"] is True
    assert one.job_name == one.scheduler["job_name"] == f"holdfast-r-{'u' * 8}-s0003"
    assert run_by(one, 0).job_name == f"holdfast-r-{'u' * 8}-a0002"


def test_only_the_excluded_nodes_may_differ_from_the_job_of_the_attempt() -> None:
    one = as_successor(request_of(), 3, "101")
    assert differences(one, request_of()) == []
    excluding = request_of().model_copy(
        update={"exclude": ("n1",), "scheduler": {**request_of().scheduler, "exclude": "n1"}}
    )
    assert differences(one, excluding) == []
    assert differences(one, request_of(gpus=4)) == ["nodes"]
    assert differences(one, request_of(partition="big")) == ["partition"]
    assert differences(one, request_of(extra={"reservation": "x"})) == ["option reservation"]


def test_a_request_on_disk_differs_in_nothing() -> None:
    one = as_successor(request_of(), 3, "101")
    assert differences(Request.model_validate_json(one.model_dump_json()), request_of()) == []


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path, "r", "u" * 32)
    made.submit(1, 2, 1_000.0)
    made.claim(1, 1_001.0)
    return made


@pytest.fixture
def waiting(run: RunFolder) -> SuccessorPaths:
    paths = run.paths.successor(1)
    paths.directory.mkdir(parents=True)
    return paths


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the agent has slept, by its own clock."""
    slept = [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    played = SimpleNamespace(monotonic=lambda: slept[0], sleep=sleep)
    monkeypatch.setattr(successor, "time", played)
    return slept


def test_documents_of_a_successor_are_read_below_the_run(waiting: SuccessorPaths) -> None:
    assert folder_of(waiting.request) == waiting.run.directory
    assert waiting.run.newest_successor() == waiting
    assert RunPaths(waiting.run.directory / "x").newest_successor() is None


def test_one_verdict_counts(waiting: SuccessorPaths) -> None:
    assert successors.decide_on(waiting, 2).attempt == 2
    assert successors.decide_on(waiting, 0, "too late").attempt == 2
    assert successors.attempt_of(waiting.run, 1) == 2


@pytest.mark.parametrize("is_lead", [True, False])
def test_a_job_runs_the_attempt_that_the_supervisor_names(
    waiting: SuccessorPaths, clock: list[float], is_lead: bool
) -> None:
    successors.decide_on(waiting, 2)
    assert successor.wait_for_verdict(waiting, is_lead=is_lead) == 2
    assert clock == [0.0]


def test_a_job_without_a_supervisor_ends_and_cannot_be_adopted(
    waiting: SuccessorPaths, clock: list[float]
) -> None:
    assert successor.wait_for_verdict(waiting, is_lead=True) == 0
    assert clock[0] == pytest.approx(successors.WAIT_S_MAX, abs=2)
    assert successors.decide_on(waiting, 2).attempt == 0


def test_another_node_waits_longer_than_node_0_and_decides_nothing(
    waiting: SuccessorPaths, clock: list[float]
) -> None:
    assert successor.wait_for_verdict(waiting, is_lead=False) == 0
    assert clock[0] > successors.WAIT_S_MAX + 30
    assert successors.attempt_of(waiting.run, 1) is None


@pytest.mark.parametrize("state", [AttemptState.COMPLETED, AttemptState.CANCELLED])
def test_a_job_ends_at_once_if_the_run_has_ended(
    run: RunFolder, waiting: SuccessorPaths, clock: list[float], state: AttemptState
) -> None:
    cause = Cause.OPERATOR if state is AttemptState.CANCELLED else None
    run.finish(1, state, cause, 10, 2_000.0)
    assert successor.wait_for_verdict(waiting, is_lead=True) == 0
    assert clock == [0.0]


class Free:
    """The room at a place, of which only the free GPUs matter."""

    def __init__(self, gpus: int | None) -> None:
        self.gpus = gpus

    def free_gpus(self, exclude: object) -> int | None:
        return self.gpus


@pytest.mark.parametrize(
    ("free", "given", "chosen"),
    [(2, {}, 8), (4, {}, 4), (None, {}, 4), (2, {"asked": {"action": "resume"}}, 4)],
)
def test_a_successor_counts_if_the_size_of_the_policy_is_not_free(
    monkeypatch: pytest.MonkeyPatch, free: int | None, given: dict[str, Any], chosen: int
) -> None:
    spec = spec_of(resources=ON_SLURM, elastic={"choices": [4, 8]})
    history = history_of(spec, attempt_of(spec, 1, Cause.PREEMPTION), **given)
    one = SimpleNamespace(is_waiting=True, request=request_of(), submission="job")
    monkeypatch.setattr(successors, "newest", lambda _: one)
    decision = Decision(action="relaunch", reason="x", gpus=4)
    room: Any = Free(free)
    found = successors.prefer(history, decision, lambda _: room, lambda _: True)
    assert found.gpus == chosen
    assert ("for which a successor waits" in found.reason) == (chosen == 8)


def test_the_local_executor_has_no_queue(waiting: SuccessorPaths) -> None:
    with pytest.raises(SubmissionRefusedError, match="has no queue"):
        LocalExecutor().submit_successor(waiting, request_of())
