"""Which GPU counts a checkpoint fits, reported before anything is queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import NOW, attempt_of, history_of, spec_of
from tests.support.runs import T0, RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.records.checkpoint_choice import newest_of_branch
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.topology import degrees_of, fitting_counts, problem_with_mesh
from holdfast.contracts.states import AttemptState, Cause
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.staging.step_facts import StepFacts
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator
from holdfast.workers.runs.feasibility import Feasibility

TENSOR_PARALLEL = {"mesh": {"dp_shard": 2, "tp": 2}, "pipeline": 1}
ELASTIC = {"resources": {"gpus_per_node": 8}, "elastic": {"min_gpus": 1, "max_gpus": 8}}


def saved_by(world_size: int, **topology: Any) -> Manifest:
    return Manifest(
        run_uid="0" * 32,
        run="r",
        name="step-00000001.a0001.l01",
        step=1,
        attempt=1,
        launch=1,
        world_size=world_size,
        files=(),
        committed_at=T0,
        topology=topology,
    )


@pytest.mark.parametrize(
    ("world_size", "topology", "fitting", "not_fitting"),
    [
        (1, {}, [1, 2, 3, 8], []),
        (4, {"mesh": {}}, [1, 3, 5], []),
        (2, {"mesh": {"dp_shard": 2}}, [1, 2, 3, 8], []),
        (2, {"mesh": {"dim0": 2}}, [1, 3], []),
        (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}}, [2, 4, 6], [1, 3, 5]),
        (4, {"mesh": {"dp_shard": 2, "tp": 2}}, [2, 4, 8], [1, 3, 5]),
        (2, {"mesh": {"tp": 2}}, [2, 4], [1, 3]),
        (4, {"mesh": {"dp_shard": 2}, "pipeline": 2}, [2, 4, 6], [1, 3]),
        (8, {"mesh": {"dp_replicate": 2, "ep": 2, "tp": 2}}, [4, 8, 12], [1, 2, 6]),
        (2, {"mesh": {}, "fixed": "its optimizer cannot be converted"}, [2], [1, 4]),
        (2, {"mesh": {}, "global_batches": [12, 8]}, [1, 2, 4], [3, 6, 8]),
        (4, {"mesh": {"dp_shard": 2, "tp": 2}, "global_batches": [6]}, [2, 4, 6], [3, 8]),
        (2, {"mesh": {}, "global_batches": "12"}, [1, 2, 5], []),
    ],
)
def test_fixed_dimensions_decide_which_counts_fit(
    world_size: int, topology: dict[str, Any], fitting: list[int], not_fitting: list[int]
) -> None:
    manifest = saved_by(world_size, **topology)
    assert [n for n in fitting if problem_with_mesh(manifest, n)] == []
    assert [n for n in not_fitting if problem_with_mesh(manifest, n) is None] == []
    counts = fitting_counts(manifest, degrees_of(manifest))
    assert world_size in counts
    assert not set(counts) & set(not_fitting)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A stopped run of four ranks in a mesh of two by two."""
    made = RunFolder(tmp_path, "kelp", "1" * 32, spec_fields=ELASTIC)
    made.submit(1, 4, T0)
    made.commit(10, 1, topology=TENSOR_PARALLEL)
    made.finish(1, AttemptState.CANCELLED, Cause.OPERATOR, 10, T0 + 100)
    return made


def test_a_relaunch_at_a_count_that_does_not_fit_is_refused_and_not_journaled(
    run: RunFolder,
) -> None:
    expected = r"3 ranks cannot hold the mesh dp_shard 2 × tp 2 .* rank counts that can: 2, 4.*fork"
    with pytest.raises(SpecError, match=expected):
        operator.request(run.paths, "relaunch", by="me", gpus=3)
    events = load_history(run.paths).events
    assert [e for e in events if e.kind is EventKind.OPERATOR_REQUEST] == []
    assert "continues at 2 GPUs" in operator.request(run.paths, "relaunch", by="me", gpus=2)


def test_excluded_and_damaged_checkpoints_do_not_limit_the_counts(run: RunFolder) -> None:
    name = run.commit(20, 1, topology={"mesh": {"tp": 4}})
    assert not Feasibility.of(load_history(run.paths)).allows(6)
    run.tell("cli", EventKind.ROLLED_BACK, to="step-00000010.a0001.l01", excluded=[name])
    assert Feasibility.of(load_history(run.paths)).allows(6)
    damaged = run.commit(30, 1, topology={"mesh": {"tp": 4}})
    (run.paths.checkpoint(damaged) / "manifest.json").write_text("{")
    assert newest_of_branch(run.paths, load_history(run.paths)).step == 10


def test_a_checkpoint_without_a_recorded_mesh_is_allowed_with_a_warning(run: RunFolder) -> None:
    run.commit(20, 1)
    found = Feasibility.of(load_history(run.paths))
    assert found.problem(3) is None
    assert "does not record its mesh" in (found.doubt(3) or "")
    assert found.doubt(2) is None, "the same count as at the save"
    assert Feasibility(saved_by(4, **TENSOR_PARALLEL), int).doubt(3) is None


def test_a_fork_is_limited_by_the_checkpoint_that_it_begins_from(
    run: RunFolder, tmp_path: Path
) -> None:
    parent = run.paths.checkpoint("step-00000010.a0001.l01")
    fork = RunFolder(tmp_path, "sprout", "2" * 32, ELASTIC, forked_path=str(parent))
    history = load_history(fork.paths)
    assert "cannot hold the mesh" in (Feasibility.of(history).problem(3) or "")
    assert Feasibility.of(history).allows(2)
    (parent / "manifest.json").unlink()
    assert Feasibility.of(history).allows(3)


@pytest.mark.parametrize(
    ("data", "limits", "expected"),
    [
        ({"global_batch": 12}, {}, {"global_batches": [12]}),
        ({"global_batch": 12}, {"global_batches": [3]}, {"global_batches": [3]}),
        ({"global_batch": 12}, {"fixed": "why"}, {"fixed": "why"}),
        ({}, {}, {}),
    ],
)
def test_the_manifest_says_which_counts_can_continue(
    data: dict[str, Any], limits: dict[str, Any], expected: dict[str, Any]
) -> None:
    facts = StepFacts(
        name=CheckpointName(step=1, attempt=1, launch=1),
        reason="interval",
        parent=None,
        metrics={},
        train_state={"data": data, **limits},
    )
    numbers = ("attempt", "launch", "rank", "local_rank", "local_ranks", "world_size", "node")
    facts_of_rank: dict[str, Any] = dict.fromkeys(numbers, 1)
    who = Identity(**facts_of_rank, nodes=1, run_uid="u", run="r", command_digest="c")
    topology = facts.for_manifest(who, {})["topology"]
    assert {key: topology[key] for key in ("fixed", "global_batches") if key in topology} == (
        expected
    )


def test_a_run_without_a_checkpoint_fits_everything(tmp_path: Path) -> None:
    bare = RunFolder(tmp_path, "kelp", "1" * 32)
    history = load_history(bare.paths)
    found = Feasibility.of(history)
    assert (found.problem(3), found.doubt(3)) == (None, None)
    with pytest.raises(NotFoundError, match="no committed checkpoint yet"):
        newest_of_branch(bare.paths, history)


@pytest.mark.parametrize(
    ("free", "gpus"), [(4, 4), (3, 2), (1, 2), (None, 4)], ids=["all", "three", "one", "unknown"]
)
def test_the_flow_shrinks_to_a_count_that_fits(free: int | None, gpus: int) -> None:
    spec = spec_of(resources={"gpus_per_node": 4}, elastic={"min_gpus": 1, "max_gpus": 4})
    history = history_of(spec, attempt_of(spec, 1, Cause.PREEMPTION))
    fits = Feasibility(saved_by(4, **TENSOR_PARALLEL), int).allows
    assert decide(history, free, now=NOW, fits=fits).gpus == gpus
