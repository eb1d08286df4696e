"""A run whose state belongs to its ranks: sizes that its checkpoint does not fit are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, wait_until

from holdfast.cli.doctor import examine
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.errors import SpecError
from holdfast.contracts.records.checkpoint_choice import newest_of_branch
from holdfast.contracts.states import AttemptState, Cause
from holdfast.flows.forks import fork_run
from holdfast.workers.decisions.policy import decide
from holdfast.workers.runs import operator

PROGRAM = Path(__file__).with_name("environment_program.py")
Make = Callable[..., LocalRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[LocalRun] = []

    def make_run(**settings: Any) -> LocalRun:
        hurry = str(tmp_path / "hurry")
        given: dict[str, Any] = {
            "checkpoint": {"interval": 2},
            "steps": 300,
            "sleep_s": 0.1,
            "hurry": hurry,
        }
        made.append(LocalRun(tmp_path / "root", program=PROGRAM, **given, **settings))
        return made[-1]

    yield make_run
    for run in made:
        run.end_all()


def saved(run: LocalRun) -> Manifest:
    wait_until(lambda: run.history().tally.commits, "a checkpoint")
    return newest_of_branch(run.paths, run.history())


@pytest.mark.more
def test_a_size_that_the_checkpoint_does_not_fit_is_refused_before_anything_stops(
    make: Make, tmp_path: Path
) -> None:
    run = make()
    attempt = run.submit(gpus=2)
    manifest = saved(run)
    assert "extra.env (Environment)" in manifest.topology["fixed"]
    with pytest.raises(SpecError, match=r"1 rank cannot load it: extra\.env .*exclude"):
        operator.request(run.paths, "relaunch", by="ann", gpus=1)
    assert not attempt.stop.exists()
    assert not run.history().attempts[-1].state.is_terminal
    found = examine(run.paths.name, 1, None, str(tmp_path / "root"))
    assert (found["ok"], found["counts"]) == (False, [2])
    assert "extra.env" in found["problem"]
    overrides = ["resources.gpus_per_node=1"]
    with pytest.raises(SpecError, match=r"extra\.env .*--spec"):
        fork_run(run.paths, manifest.name, name="other", overrides=overrides, by="ann")
    (tmp_path / "hurry").touch()
    assert run.wait_for_end().state is AttemptState.COMPLETED


@pytest.mark.more
@pytest.mark.parametrize("way", ["afresh", "gathered"])
def test_a_program_that_provides_for_it_continues_on_fewer_ranks(
    make: Make, tmp_path: Path, way: str
) -> None:
    run = make(**{way: True})
    run.submit(gpus=2)
    assert "fixed" not in saved(run).topology
    assert "ends after" in operator.request(run.paths, "relaunch", by="ann", gpus=1)
    stopped = run.wait_for_end()
    assert (stopped.state, stopped.cause) == (AttemptState.CANCELLED, Cause.OPERATOR)
    assert decide(run.history(), None, now=stopped.ended_at or 0.0).gpus == 1
    (tmp_path / "hurry").touch()
    alone = run.submit(gpus=1)
    ended = run.wait_for_end()
    assert ended.state is AttemptState.COMPLETED, ended.evidence
    before = (ended.first_step or 0) - 1
    taken = (before, 300) if way == "gathered" else (0, 300 - before)
    assert "took {} to {} steps".format(*taken) in alone.rank_log(0, 1, 0).read_text()
