"""DeepSpeed programs: preempted, killed, resized, and compared with uninterrupted ones."""

from __future__ import annotations

import json
import math
import re
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.process.local_runs import LocalRun, send
from tests.process.stream_program import SIZES
from tests.support.rank_programs import run_program

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState

PROGRAM: Final = Path(__file__).with_name("deepspeed_program.py")
CASES_S: Final = 500.0
STEPS: Final = 16
INTERVAL: Final = 5
QUICK: Final = ("whole", "damaged", "unconvertible", "resized-0")
EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "deepspeed"
# Sums in another order: relative difference of losses after a resize.
LOSS_APART_MAX: Final = 1e-3

Record = dict[int, dict[str, Any]]


def read_record(folder: Path, rank: int) -> Record:
    """The last line of each step: a step that was repeated counts once."""
    path = folder / f"rank{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    """A run that is killed once, on rank 1 at step 7."""
    made = LocalRun(
        tmp_path / "root",
        program=PROGRAM,
        checkpoint={"interval": INTERVAL},
        folder=str(tmp_path),
        steps=STEPS,
        stage=2,
        sleep_s=0.5,
        hurry=str(tmp_path / "hurry"),
        kill=[1, 7],
    )
    yield made
    made.end_all()


def run_cases(folder: Path, *names: str) -> dict[str, Any]:
    """What `deepspeed_cases` found, by case."""
    said = run_program("frameworks.deepspeed_cases", folder, *names, timeout_s=CASES_S)
    found: dict[str, Any] = json.loads(said[said.index("{\n") :])
    return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quick cases, in one process, because DeepSpeed takes seconds to start."""
    folder = tmp_path_factory.mktemp("cases")
    return run_cases(folder, *QUICK)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What cannot be resumed or trained, in one process."""
    found: dict[str, Any] = run_cases(tmp_path_factory.mktemp("refused"), "refused")["refused"]
    return found


@pytest.mark.more
def test_a_run_is_killed_preempted_and_resized_like_an_uninterrupted_one(
    tmp_path: Path, run: LocalRun, cases: dict[str, Any]
) -> None:
    attempt = run.submit()
    # The rank was killed at step 7, and the next launch of the same job resumes after step 5.
    run.wait_for_step(attempt, 9)
    send(run.claim(attempt).pid, signal.SIGTERM)
    preempted = run.wait_for_end()
    assert preempted.state is AttemptState.PREEMPTED, preempted
    stopped_at = run.outcome(attempt).committed_step
    assert stopped_at is not None
    assert 9 <= stopped_at < STEPS
    resumed = [event.data for event in run.events(EventKind.RESUMED)]
    assert [event["step"] for event in resumed] == [0, 5]

    (tmp_path / "hurry").touch()
    run.submit(gpus=1)
    ended = run.wait_for_end()
    assert ended.state is AttemptState.COMPLETED, ended
    (found,) = [e.data for e in run.events(EventKind.RESUMED) if e.data["world_size"] == 1]
    assert found["step"] == stopped_at
    assert "universal format" in found["notes"][0]
    assert not run.paths.converted.exists()
    newest = run.paths.list_checkpoints()[-1]
    manifest = read_manifest(newest)
    assert manifest is not None
    assert manifest.step == STEPS
    assert {"latest", f"global_step{STEPS}/mp_rank_00_model_states.pt"} <= {
        entry.path for entry in manifest.files
    }

    compare(tmp_path, Path(cases["whole"]["folder"]), until=stopped_at)


def compare(broken: Path, whole: Path, *, until: int) -> None:
    """Both runs are equal to the bit until step `until`; then `broken` continues with one rank."""
    expected = [read_record(whole, rank) for rank in range(2)]
    found = [read_record(broken, rank) for rank in range(2)]
    for rank in range(2):
        for step in range(1, until + 1):
            assert found[rank][step] == expected[rank][step], (rank, step)
    for step in range(until + 1, STEPS + 1):
        alone, both = found[0][step], [record[step] for record in expected]
        assert sorted(alone["ids"]) == sorted(both[0]["ids"] + both[1]["ids"])
        assert (alone["lr"], alone["seen"]) == (both[0]["lr"], both[0]["seen"])
        assert alone["engine_step"] == step
        mean = sum(line["loss"] for line in both) / 2
        assert math.isclose(alone["loss"], mean, rel_tol=LOSS_APART_MAX)


@pytest.mark.more
def test_a_damaged_checkpoint_and_one_without_a_rank_s_file_are_passed_over(
    cases: dict[str, Any],
) -> None:
    found = cases["damaged"]
    assert found["errors"] == [["", ""], ["", ""]]
    assert found["steps"] == [*range(1, 13), *range(5, 14)]
    (told,) = found["told"]
    assert "continues after step 4" in told
    assert re.search(r"step-00000012\S+: damaged: \S+zero_pp_rank_1\S+ checksum", told)
    assert re.search(r"step-00000008\S+: damaged: \S+zero_pp_rank_1\S+ missing", told)
    assert found["kept"], "a damaged checkpoint was changed"


@pytest.mark.more
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("with_other_stage", "saved with ZeRO stage 2, and the program uses stage 1"),
        ("with_plain_session", "deepspeed wrote this checkpoint, in its own files"),
        ("with_other_version", "Install deepspeed 0.19.* to continue this run"),
    ],
)
def test_a_checkpoint_of_another_stage_framework_or_version_is_refused_and_kept(
    refused: dict[str, Any], change: str, error: str
) -> None:
    assert refused[change].startswith("CheckpointError: ")
    assert error in refused[change]
    assert (refused["saved"], refused["resumed"], refused["unchanged"]) == ([""], [""], True)
    assert refused["steps"] == [1, 2, 3, 4, 5]


@pytest.mark.more
def test_a_state_that_deepspeed_cannot_convert_stays_on_its_number_of_ranks(
    cases: dict[str, Any],
) -> None:
    found = cases["unconvertible"]
    assert found["saved"] == ["", ""]
    (refused,) = found["alone"]
    assert "2 ranks saved it, and 1 rank cannot load it" in refused
    assert "RMSprop has square_avg" in refused


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("unwrapped", "SpecError: a Linear: expected the engine"),
        ("twice_wrapped", "its module is an engine too; call deepspeed.initialize once"),
        ("two_sessions", "SessionError: this process already has a Session"),
        ("one_micro_batch", "run all 4 micro-batches in one step"),
        ("taken_key", "client_state has module"),
        ("stream_of_epochs", "Pass repeat=True, and loop over session.steps"),
        ("unsaved_loader", "no checkpoint has the state of this StatefulDataLoader"),
        ("stateless_loader", "this DataLoader reads a stream without a state"),
    ],
)
def test_a_wrong_engine_or_loop_is_refused(refused: dict[str, Any], case: str, error: str) -> None:
    assert error in refused[case]


@pytest.mark.slow
def test_a_loop_over_deepspeed_s_loader_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    found = run_cases(tmp_path, "loaders")["loaders"]
    assert found["errors"] == [["", ""], ["", ""]]
    assert found["equal"] == [True, True]
    assert found["repeated"] == 0


@pytest.mark.slow
def test_streams_continue_to_the_bit_and_at_other_sizes(tmp_path: Path) -> None:
    found = run_cases(tmp_path, "streams")["streams"]
    samples = [100 * shard + number for shard, size in enumerate(SIZES) for number in range(size)]
    for name in ("steps", "epochs"):
        assert found[name] == found[f"{name}, last"] == ["", ""]
        assert all("status" in "".join(found[f"{name}, {step}"]) for step in (2, 5, 6, 9, 11))
        assert found[f"{name}, equal"] == [True, True]
        assert found[f"{name}, samples"]["0"] == samples
    assert found["epochs, samples"]["1"] == samples
    assert found["sized"] == [""] * 6
    assert found["sized, worlds"] == [2] * 3 + [1] * 2 + [3] * 7
    assert found["sized, samples"]["0"] == samples


@pytest.mark.slow
def test_the_example_is_stopped_and_ends_on_one_rank(tmp_path: Path) -> None:
    found = run_cases(tmp_path, "example")["example"]
    assert found["errors"] == [["", ""], [""]]
    first, second = found["epochs"]
    assert first[0].startswith("epoch 0 step 16 ")
    assert second[-1].startswith("epoch 2 step 48 ")
    spec = RunSpec.model_validate(tomllib.loads((EXAMPLE / "spec.toml").read_text()))
    assert spec.command == ("examples/deepspeed/train.py",)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_resumes_to_the_bit_after_a_kill_and_after_a_signal(
    tmp_path: Path, stage: int
) -> None:
    found = run_cases(tmp_path, f"interrupted-{stage}")[f"interrupted-{stage}"]
    assert found["kill, first"] != ["", ""]
    assert found["term, first"] == ["", ""]
    for name in ("kill", "term"):
        assert found[f"{name}, second"] == ["", ""]
        assert found[f"{name}, equal"] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_continues_on_fewer_and_on_more_ranks(tmp_path: Path, stage: int) -> None:
    check_resized(run_cases(tmp_path, f"resized-{stage}")[f"resized-{stage}"])


@pytest.mark.more
def test_an_engine_without_zero_continues_on_fewer_and_on_more_ranks(
    cases: dict[str, Any],
) -> None:
    check_resized(cases["resized-0"])


def check_resized(found: dict[str, Any]) -> None:
    assert found["errors"] == [["", ""], [""], ["", ""]]
    assert found["worlds"] == [2] * 4 + [1] * 4 + [2] * 4
    assert found["lr"]
    assert found["seen"]
    assert found["apart"] < LOSS_APART_MAX
    assert not found["left"]
