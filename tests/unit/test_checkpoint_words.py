"""Checkpoints by a word: `latest`, `best` and `step-3000`, in the command, the API and programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.records.checkpoint_choice import choose_checkpoint
from holdfast.trainer.loading.checkpoint import find_directory

STEPS = {50: 3.0, 100: 1.0, 150: 2.0, 200: float("nan")}
BEST = {"checkpoint": {"keep": {"best": {"metric": "loss", "mode": "min", "n": 1}}}}


@pytest.fixture
def run(root: Path) -> RunFolder:
    made = RunFolder(root, "kelp", "a" * 32, BEST)
    made.submit(1, 2, 0.0)
    made.claim(1, 1.0)
    made.launch(1, 1, 0, None)
    for step, loss in STEPS.items():
        made.commit(step, 1, metrics={"loss": loss}, at=float(step))
    return made


def test_words_mean_a_checkpoint_of_the_branch(run: RunFolder) -> None:
    assert choose_checkpoint(run.paths, "latest") == "step-00000200.a0001.l01"
    assert choose_checkpoint(run.paths, "best") == "step-00000100.a0001.l01"
    for word in ("step-150", "step-0150", "step-00000150"):
        assert choose_checkpoint(run.paths, word) == "step-00000150.a0001.l01"
    excluded = ["step-00000200.a0001.l01", "step-00000100.a0001.l01"]
    run.tell("rank0", EventKind.ROLLED_BACK, excluded=excluded)
    assert choose_checkpoint(run.paths, "latest") == "step-00000150.a0001.l01"
    assert choose_checkpoint(run.paths, "best") == "step-00000150.a0001.l01"
    assert choose_checkpoint(run.paths, "step-100") == excluded[1], "a person asked for it"
    run.commit(100, 2, at=300.0)
    (run.paths.checkpoints / "step-00000100.a0009.l01").mkdir()
    assert choose_checkpoint(run.paths, "step-100") == "step-00000100.a0002.l01"


def test_a_word_without_a_checkpoint_names_the_next_step(run: RunFolder, root: Path) -> None:
    with pytest.raises(
        NotFoundError, match="no checkpoint of step 120; the nearest steps: 50, 100"
    ):
        choose_checkpoint(run.paths, "step-120")
    empty = RunFolder(root, "empty", "b" * 32)
    for word, said in (
        ("latest", "no committed checkpoint yet"),
        ("best", "no checkpoint.keep.best.*holdfast checkpoints empty --best METRIC"),
        ("step-1", "the nearest steps: none"),
    ):
        with pytest.raises(NotFoundError, match=said):
            choose_checkpoint(empty.paths, word)


@pytest.mark.more
@pytest.mark.parametrize(
    ("word", "step"), [("latest", 200), ("best", 100), ("step-00000150", 150), ("step-50", 50)]
)
def test_the_command_and_programs_take_words(
    call: Call, run: RunFolder, word: str, step: int
) -> None:
    name = f"step-{step:08d}.a0001.l01"
    assert call("pin", f"kelp:{word}", "--json").json["checkpoint"] == f"kelp:{name}"
    assert call("unpin", f"kelp:{word}", "--json").json["checkpoint"] == f"kelp:{name}"
    assert call("verify", f"kelp:{word}", "--json").json["checkpoint"] == f"kelp:{name}"
    assert find_directory(f"kelp:{word}") == run.paths.checkpoint(name)
    refused = call("pin", "kelp:newest")
    assert refused.status == 3
    assert "<run>:latest, <run>:best" in refused.err


def test_checkpoints_are_listed_by_a_metric(call: Call, run: RunFolder) -> None:
    def steps(*options: str) -> list[int]:
        return [row["step"] for row in call("checkpoints", "kelp", *options, "--json").json]

    assert steps("--best", "loss") == [100, 150, 50]
    assert steps("--best", "loss", "--mode", "max") == [50, 150, 100]
    assert "loss" in call("checkpoints", "kelp", "--best", "loss").out
    refused = call("checkpoints", "kelp", "--best", "los")
    assert (refused.status, "logged metrics: loss" in refused.err) == (3, True)
    assert call("checkpoints", "kelp", "--mode", "max").status == 2


def test_the_last_checkpoints_are_kept_once(call: Call, run: RunFolder) -> None:
    call("pin", "kelp:step-50")
    planned = call("prune", "kelp", "--keep-last", "2", "--dry-run", "--json").json
    assert [one["step"] for one in planned["deleted"]] == [100]
    assert planned["deleted"][0]["reason"] == "not among the last 2"
    done = call("prune", "kelp", "--keep-last", "2", "--yes", "--json").json
    assert [one["step"] for one in done["deleted"]] == [100]
    left = sorted(one.name[5:13] for one in run.paths.list_checkpoints())
    assert [int(one) for one in left] == [50, 150, 200], "a pin counts, the spec's best does not"
    assert call("prune", "kelp", "--keep-last", "0").status == 2


def test_logs_name_earlier_attempts(call: Call, run: RunFolder) -> None:
    assert "the last of" not in call("logs", "kelp").err
    run.submit(2, 2, 400.0)
    assert "attempt 2, the last of 2" in call("logs", "kelp").err
    assert "the last of" not in call("logs", "kelp", "--attempt", "1").err
    assert call("logs", "kelp", "--json").json["attempts"] == [1, 2]


@pytest.mark.more
def test_reindex_takes_the_root_in_both_ways(call: Call, run: RunFolder, root: Path) -> None:
    ways = (("reindex", str(root)), ("reindex", "--root", str(root)), ("db", "reindex"))
    assert [call(*words, "--json").json["runs"] for words in ways] == [["kelp"]] * 3
    refused = call("reindex", str(root), "--root", "/elsewhere")
    assert refused.status == 2
    assert "not both" in refused.err
