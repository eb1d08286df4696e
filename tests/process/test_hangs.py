"""Ranks that hang, under the real agent: detected, dumped, killed and restarted. Slow ranks are
not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, processes_of, wait_until

from holdfast.contracts.journal import EventKind
from holdfast.contracts.states import AttemptState, Cause

PROGRAM = Path(__file__).with_name("hang_program.py")
SILENCE_S = {"train": 3, "eval": 1}
STALLS = ("sleep", "helper", "compute")
# Duration of the soak with slow steps, evaluations and stalls.
SOAK_MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))
Make = Callable[..., LocalRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Creates runs of the program that hangs, and ends their processes afterwards."""
    made: list[LocalRun] = []

    def make_run(*, restarts: int = 3, **settings: Any) -> LocalRun:
        supervision = {"silence_s": SILENCE_S, "restarts_in_place": restarts}
        root = tmp_path / f"root{len(made)}"
        made.append(LocalRun(root, program=PROGRAM, supervision=supervision, **settings))
        return made[-1]

    yield make_run
    for run in made:
        run.end_all()


def dumped(run: LocalRun, event: Any) -> str:
    """The contents of all dumps that a journal line names."""
    folders = [run.paths.directory / name for name in event.data["dumps"]]
    return "\n".join(path.read_text() for folder in folders for path in folder.iterdir())


def test_looping_rank_is_restarted_and_a_slow_evaluation_is_not(
    make: Make,
) -> None:
    # The second evaluation is twenty times slower, and longer than the limit of its phase.
    run = make(
        steps=60,
        hangs={"1": ["loop", 1, 45]},
        evals=[[15, 0.3, 1], [30, 6.0, 20]],
        checkpoint={"interval": 20},
    )
    attempt = run.submit()
    view = run.wait_for_end()
    assert view.state is AttemptState.COMPLETED, view.evidence
    outcome = run.outcome(attempt)
    assert [i.ending for i in outcome.launches] == ["hung", "completed"]
    assert outcome.launches[0].last_step == 44
    assert outcome.launches[1].first_step is not None
    assert outcome.launches[1].first_step > 40
    (confirmed,) = run.events(EventKind.HANG_CONFIRMED)
    assert confirmed.data["finding"].startswith("missing: rank 1 at get_stuck")
    assert "waiting: rank 0 at train" in confirmed.data["finding"]
    said = dumped(run, confirmed)
    assert "get_stuck" in said
    assert "all_reduce" in said
    suspicions = run.events(EventKind.HANG_SUSPECTED)
    assert suspicions[-1].data["dumps"] == confirmed.data["dumps"]
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


@pytest.mark.slow
def test_each_kind_of_hang_is_detected_and_the_last_ends_the_attempt(make: Make) -> None:
    kinds = {"1": ["sleep", 0, 20], "2": ["mismatch", 1, 40], "3": ["loop", 0, 60]}
    run = make(steps=80, hangs=kinds, restarts=2, checkpoint={"interval": 10})
    run.submit()
    view = run.wait_for_end()
    assert (view.state, view.cause) == (AttemptState.HUNG, Cause.HANG)
    findings = [event.data["finding"] for event in run.events(EventKind.HANG_CONFIRMED)]
    assert findings[0].startswith("missing: rank 0 at get_stuck")
    assert "get_stuck" in findings[1]
    assert "at train" in findings[1]
    assert findings[2].startswith("missing: rank 0 at get_stuck")
    assert any("dumps/node-0000-" in line for line in view.evidence)


@pytest.mark.slow
def test_slow_rank_is_reported_as_straggler(make: Make) -> None:
    run = make(steps=600, sleep_s=0.02, slow_rank=1, slow_s=0.06)
    run.submit()
    (straggler,) = wait_until(lambda: run.events(EventKind.STRAGGLER), "the slow rank's name")
    assert straggler.data["rank"] == 1
    assert straggler.data["own_s"] > 1.5 * straggler.data["peers_s"]
    assert run.wait_for_end().state is AttemptState.COMPLETED
    assert run.events(EventKind.HANG_CONFIRMED) == []


def slow_plan(seed: int, minutes: float) -> tuple[list[Any], list[Any]]:
    """(evals, stalls) of a run at random steps, each 3 to 10 times longer than usual."""
    chance, at, spent_s = random.Random(seed), 40, 0.0
    evals, stalls = [], []
    while spent_s < minutes * 60:
        at += chance.randint(10, 60)
        factor = chance.uniform(3.0, 10.0)
        if chance.random() < 0.5:
            evals.append([at, 2.0 * factor, chance.choice([1, 4])])
            spent_s += 2.0 * factor
        else:
            stalls.append([at, chance.randrange(2), 2.0 * factor, chance.choice(STALLS)])
            spent_s += 2.0 * factor
    return [[10, 2.0, 4], [20, 2.0, 1], [30, 2.0, 1], *evals], stalls


@pytest.mark.slow
@pytest.mark.timeout(SOAK_MINUTES * 90)
def test_slow_steps_evaluations_and_stalls_do_not_count_as_hangs(make: Make) -> None:
    evals, stalls = slow_plan(seed=7, minutes=SOAK_MINUTES * 0.8)
    steps = max(evals[-1][0], stalls[-1][0]) + 40
    # Stalls are not announced; the run has seen some of two seconds before.
    seen = [[6, 0, 2.0, "sleep"], [7, 1, 2.0, "sleep"], [8, 0, 2.0, "sleep"]]
    run = make(
        steps=steps, sleep_s=0.05, evals=evals, stalls=[*seen, *stalls], checkpoint={"interval": 50}
    )
    attempt = run.submit()
    view = run.wait_for_end(SOAK_MINUTES * 85)
    assert view.state is AttemptState.COMPLETED, view.evidence
    assert [i.ending for i in run.outcome(attempt).launches] == ["completed"]
    assert run.events(EventKind.HANG_CONFIRMED) == []
