"""An agent's ranks are killed at chosen moments of a save; the flusher survives and commits."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun, wait_until
from tests.support.agent_ranks import (
    committed,
    filling_of,
    flusher_of,
    hold_in_copy,
    ranks_of,
    send_all,
    slots_of,
    steps_in,
    wait_for_commit,
)

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.states import AttemptState
from holdfast.trainer.slots.slots import SlotState

STEPS = 70
SAVE_STEP = 24
# Large enough that the test can stop a rank in the middle of a copy.
PADDING = 8 << 20


@pytest.mark.slow
def test_killed_ranks_commit_the_staged_step_or_the_last_complete_snapshot(tmp_path: Path) -> None:
    """Every rank is killed twice: in the middle of a snapshot's copy, and right after staging a
    save that the flusher has not started to write."""
    checkpoint = {"interval": SAVE_STEP, "snapshots": 1}
    run = LocalRun(
        tmp_path / "root", checkpoint=checkpoint, steps=STEPS, sleep_s=0.05, padding=PADDING
    )
    attempt = run.submit()
    try:
        agent = run.claim(attempt).pid
        (ranks,) = ranks_of(run, attempt, 1).values()
        with slots_of(agent) as slots:
            assert len(slots) == 4
            copied = hold_in_copy(ranks, slots)
            send_all(ranks, signal.SIGKILL)
        kept = wait_for_commit(run, lambda manifest: manifest.reason == "crash")
        assert kept.step == copied - 1
        assert filling_of(run, kept) == {float(copied - 1)}

        (ranks,) = ranks_of(run, attempt, 2).values()
        flusher = flusher_of(agent)
        send_all([flusher], signal.SIGSTOP)
        try:
            with slots_of(agent) as slots:
                wait_until(lambda: len(steps_in(slots, SlotState.SEALED)) == 2, "a staged step")
                (staged,) = set(steps_in(slots, SlotState.SEALED))
                send_all(ranks, signal.SIGKILL)
            assert staged not in committed(run)
        finally:
            send_all([flusher], signal.SIGCONT)
        saved = wait_for_commit(run, lambda m: m.step == staged and m.reason != "crash")
        assert filling_of(run, saved) == {float(staged)}

        view = run.wait_for_end()
        assert (view.state, view.last_step) == (AttemptState.COMPLETED, STEPS)
        lives = run.outcome(attempt).launches
        assert [life.ending for life in lives] == ["crashed", "crashed", "completed"]
        for before, after in itertools.pairwise(lives):
            assert before.last_step is not None
            assert after.first_step is not None
            assert after.first_step - 1 >= before.last_step - 1, "at most one step may be lost"
        told = [e.data for e in run.events(EventKind.COMMITTED) if e.data.get("reason") == "crash"]
        assert told[0]["checkpoint"] == kept.name
        assert [e.data["step"] for e in run.events(EventKind.RESUMED)][:2] == [0, kept.step]
    finally:
        run.end_all()
