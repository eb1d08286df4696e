"""`simulate` against a real run with the same preemptions and the costs that the run had."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun, wait_until

from holdfast.contracts.account.timeline import goodput_of
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import RunState
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.decisions.attempt_costs import measured_costs
from holdfast.workers.runs.simulation import simulate
from holdfast.workers.schedulers.cluster_history import Trace

STEPS = 1000
PREEMPTED_AT = (150, 420, 760)
# Relative, of the run's time and of its ETTR.
ERROR_MAX = 0.05
LOG = logging.getLogger("holdfast.test")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_simulation_ends_when_the_real_run_did(tmp_path: Path, index: Index) -> None:
    run = LocalRun(
        tmp_path / "root", checkpoint={"interval": 50, "snapshots": "off"}, steps=STEPS, sleep_s=0.1
    )
    supervisor = Supervisor(paths=run.paths, index=index, log=LOG, submit=submit_next)
    thread = threading.Thread(target=supervisor.run, daemon=True)
    thread.start()
    try:
        for number, step in enumerate(PREEMPTED_AT, start=1):
            attempt = run.paths.attempt(number)
            wait_until(attempt.claim.exists, f"the claim of attempt {number}", 300)
            run.wait_for_step(attempt, step)
            os.kill(run.claim(attempt).pid, signal.SIGTERM)
            wait_until(attempt.outcome.exists, f"the end of attempt {number}", 120)
        thread.join(400)
        history = load_history(run.paths)
        assert history.state is RunState.COMPLETED
    finally:
        run.end_all()
    created_at, last = history.record.created_at, history.attempts[-1]
    assert last.ended_at is not None
    took_s = last.ended_at - created_at
    real = goodput_of(history, until=last.ended_at)
    free = [run.spec.gpus] * (math.ceil(took_s) + 60)
    for view in history.attempts[:-1]:
        assert view.outcome is not None
        assert view.outcome.stop_requested_at is not None
        # The scheduler takes the GPUs away for a moment.
        free[int(view.outcome.stop_requested_at - created_at)] = 0
    played = simulate(run.spec, STEPS, measured_costs(history), Trace(tuple(free), 1.0))
    print(f"real: {took_s:.1f} s, ETTR {real.ettr:.3f}; played: {played.ends_s:.1f} s,", end=" ")
    print(f"ETTR {played.goodput.ettr:.3f}; {time.strftime('%H:%M')}")
    assert played.is_complete
    assert played.preemptions == len(PREEMPTED_AT)
    assert (played.goodput.steps_lost, real.steps_lost) == (0, 0)
    assert played.ends_s == pytest.approx(took_s, rel=ERROR_MAX)
    assert played.goodput.ettr == pytest.approx(real.ettr, rel=ERROR_MAX)
