"""Cloud notices under the real agent: an early save, then a stop in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.local_runs import LocalRun, wait_until
from tests.support.metadata_server import AwsService, serving

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import committed_checkpoints
from holdfast.contracts.states import AttemptState, Cause

LEAD_S = 60.0


@pytest.fixture
def service() -> Iterator[AwsService]:
    served = AwsService()
    with serving(served):
        yield served


def test_rebalance_notice_saves_early_and_interruption_loses_no_step(
    service: AwsService, tmp_path: Path
) -> None:
    notices = {"notices": "aws", "notices_url": service.url}
    run = LocalRun(tmp_path, steps=4000, sleep_s=0.05, supervision=notices)
    try:
        attempt = run.submit()
        run.wait_for_step(attempt, 3)
        service.rebalance = {"noticeTime": "2020-10-27T08:22:00Z"}
        early = wait_until(lambda: committed_checkpoints(run.paths), "the early save")
        run.wait_for_step(attempt, early[0].step + 3)
        now = time.time()
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + LEAD_S))
        service.action = {"action": "terminate", "time": at}
        view = run.wait_for_end()
    finally:
        run.end_all()
    assert [manifest.reason for manifest in early] == ["notice"]
    assert (view.state, view.cause) == (AttemptState.PREEMPTED, Cause.PREEMPTION)
    assert any("EC2 announced to terminate" in line for line in view.evidence)
    outcome = run.outcome(attempt)
    assert outcome.committed_step == outcome.last_step
    assert (outcome.last_step or 0) > early[0].step
    assert outcome.ended_at < now + LEAD_S
    (signal,) = run.events(EventKind.SIGNAL)
    assert signal.data["source"] == "notice"
    assert signal.data["deadline"] == pytest.approx(now + LEAD_S, abs=1.0)
    assert [e.data["notice"] for e in run.events(EventKind.NOTICE)] == ["save", "stop"]
    assert len(run.events(EventKind.STOP_AGREED)) == 1
