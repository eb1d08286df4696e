"""Ranks that hang, under the real agent: detected, dumped, killed and restarted. Slow ranks are
not."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, processes_of, wait_until
from tests.support.ras_answers import PlayedRank, in_json

from holdfast.contracts.account.timeline import goodput_of
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.watch.silence import FAINT_SIGNS_S, RankStatus, Sample, signs_of_life
from holdfast.workers.agent.watch.stacks import StackTaker, StackTarget
from holdfast.workers.runs import operator

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


def test_looping_rank_is_restarted_and_a_slow_evaluation_is_not(make: Make, tmp_path: Path) -> None:
    ranks = [PlayedRank(r, -1, "10.0.0.1", {"AllReduce": 94 - r}) for r in range(2)]
    answer = tmp_path / "answer"
    answer.write_bytes(in_json({0xCF26: ranks}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The second evaluation is twenty times slower, and longer than the limit of its phase.
    run = make(
        steps=60,
        hangs={"1": ["loop", 1, 45]},
        evals=[[15, 0.3, 1], [30, 6.0, 20]],
        checkpoint={"interval": 20},
        environment={"NCCL_RAS_ADDR": f"127.0.0.1:{port}"},
        ras=[port, str(answer)],
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
    assert confirmed.data["finding"].endswith(
        "; by NCCL RAS, rank 1 is behind in AllReduce of communicator cf26 "
        "(93 calls, 94 by 1 other)"
    )
    said = dumped(run, confirmed)
    assert answer.read_text() in said
    assert "get_stuck" in said
    assert "all_reduce" in said
    suspicions = run.events(EventKind.HANG_SUSPECTED)
    assert suspicions[-1].data["dumps"] == confirmed.data["dumps"]
    wait_until(lambda: not processes_of(run.paths), "the end of every process")


LOADER = """
import time, torch
class Stuck(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        ready()
        time.sleep(3600)
next(iter(torch.utils.data.DataLoader(Stuck(), num_workers=1)))
"""
POLLS = """
import time
def wait_for_peer():
    looks = 0
    ready()
    while True:
        looks += 1
        time.sleep(0.1)
wait_for_peer()
"""
SHUFFLES = """
import random
def shuffle(order, draw=random.random):
    ready()
    while True:
        for i in range(len(order) - 1, 0, -1):
            j = int(draw() * (i + 1))
            order[i], order[j] = order[j], order[i]
shuffle(list(range(1 << 20)))
"""
# torch looks at the queue of its workers every 5 s.
APART_S = 6.0


@pytest.mark.more
def test_waits_with_a_deadline_are_no_sign_of_life_and_computing_is(tmp_path: Path) -> None:
    begin = "import sys\ndef ready(): print(flush=True)\n"
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", begin + program], stdout=subprocess.PIPE, start_new_session=True
        )
        for program in (LOADER, POLLS, SHUFFLES)
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        targets = [StackTarget(rank=n, pid=one.pid) for n, one in enumerate(programs)]
        taker, samples = StackTaker(), []
        for number in (1, 2):
            time.sleep(APART_S if number == 2 else 1.0)
            at = time.monotonic()
            taker.take(targets, tmp_path, 1, number)
            samples.append((at, wait_until(lambda: taker.sample, "the stacks").stacks))
        taker.close()
    finally:
        for program in programs:
            # The loader's worker sleeps on after its parent has died.
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()

    def living(phase: str, silent_s: float) -> list[int]:
        statuses = [
            RankStatus(rank=one.rank, pid=one.pid, step=7, phase=phase, silent_s=silent_s)
            for one in targets
        ]
        before, after = (
            Sample(at=at, statuses=statuses, stacks={stack.rank: stack for stack in stacks})
            for at, stacks in samples
        )
        assert all(stack.source == "py-spy" for stack in after.stacks.values())
        # What the three have in common: a local variable has changed.
        assert all(before.stacks[n].digest != after.stacks[n].digest for n in range(3))
        return signs_of_life(before, after)

    assert living("train", 60.0) == [2]
    assert living("eval", 60.0) == [0, 1, 2]
    assert living("eval", FAINT_SIGNS_S) == [2]


@pytest.mark.more
def test_hang_that_holdfast_does_not_end_is_accounted_as_hung(tmp_path: Path) -> None:
    run = LocalRun(
        tmp_path / "root",
        program=PROGRAM,
        gpus=1,
        steps=10**6,
        hangs={"1": ["sleep", 0, 30]},
        supervision={"hangs": False, "grace_s": 3, "flush_timeout_s": 3},
    )
    attempt = run.submit()
    try:
        run.wait_for_step(attempt, 29)
        time.sleep(4.0)
        operator.request(run.paths, "stop", by="ann")
        view = run.wait_for_end()
        (ended,) = run.events(EventKind.LAUNCH_ENDED)
        hung_s = ended.data["trained_until"] - ended.data["hangs_from"]
        goodput = goodput_of(run.history(), until=view.ended_at or 0.0)
        # The silence before the stop, and the wait for ranks that did not stop.
        assert hung_s > 6.5
        assert goodput.hung_s == pytest.approx(hung_s, abs=0.1)
        assert goodput.training_s + goodput.lost_s < 0.5 * hung_s
        assert goodput.flushing_s < 2.5
    finally:
        run.end_all()


@pytest.mark.more
def test_program_without_a_session_is_examined_once_and_not_ended(tmp_path: Path) -> None:
    run = LocalRun(
        tmp_path / "root",
        gpus=1,
        session=False,
        sleep_s=400,
        heeds_signals=True,
        supervision={"silence_s": {"start": 4}},
    )
    run.submit()
    try:
        # A look while the program starts shows life, and the next one comes later.
        wait_until(lambda: run.events(EventKind.HANG_SUSPECTED), "the suspicion")
        time.sleep(5.0)
        ranks = [one for one in processes_of(run.paths) if one.environ().get("RANK") == "0"]
        ranks[-1].send_signal(signal.SIGTERM)
        view = run.wait_for_end()
        assert view.state is AttemptState.COMPLETED, view.evidence
        (suspected,) = run.events(EventKind.HANG_SUSPECTED)
        assert suspected.data["finding"].startswith("no rank has made a Session for")
        assert "at main (process/agent_program.py" in suspected.data["finding"]
        assert "agent_program.py" in dumped(run, suspected)
    finally:
        run.end_all()


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
