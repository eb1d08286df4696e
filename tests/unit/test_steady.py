"""The clock of the agent's decisions, and what a set clock cannot change."""

from __future__ import annotations

import time

import pytest

from holdfast.contracts.node import clocks
from holdfast.contracts.spec.sections import Supervision
from holdfast.contracts.states import Cause
from holdfast.workers.agent.stops.sources import StopRequest, kill_at, slurm_lead_s
from holdfast.workers.schedulers import slurm_client


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_stop_keeps_its_time_when_the_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    assert abs(clocks.now() - time.time()) < 5
    request = StopRequest(
        source="signal",
        name="SIGTERM",
        cause=Cause.PREEMPTION,
        requested_at=clocks.now(),
        deadline=clocks.now() + 30,
    )
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    left_s = kill_at(request, Supervision(), has_session=True) - clocks.now()
    assert 25 < left_s < 30


@pytest.mark.parametrize(("ahead_s", "counted"), [(600.0, True), (-600.0, True), (1.0, False)])
def test_difference_to_slurms_clock_is_found(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float, counted: bool
) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(clocks.now() + ahead_s))
    answer = f"Configuration data as of {at}\nAccountingStorageType = none\n"
    monkeypatch.setattr(slurm_client, "call", lambda arguments, timeout_s: answer)
    found_s = slurm_lead_s()
    assert found_s == pytest.approx(ahead_s, abs=2) if counted else found_s == 0.0
