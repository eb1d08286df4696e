"""The predicted ETTR for given costs and faults."""

from __future__ import annotations

import pytest

from holdfast_bench.drills.ettr import Costs, Fault, Stall, predict_ettr

COSTS = Costs(step_s=1.0, blocked_s=0.5, flush_s=4.0, start_s=5.0, load_s=3.0)
# 1,000 productive seconds, one start, one load, ten saves and the last flush.
QUIET_S = 1000 + 5 + 3 + 10 * 0.5 + 4


@pytest.mark.parametrize(
    ("faults", "more_s"),
    [
        ([], 0.0),
        ([Fault(is_announced=True)], 0.5 + 4 + 8),
        ([Fault(is_announced=True, wait_s=20)], 0.5 + 4 + 8 + 20),
        ([Fault(is_announced=False, interval_steps=10, detection_s=2)], 2 + 5 + 8),
        ([Fault(is_announced=False, detection_s=2)] * 3, 3 * (2 + 8)),
        ([Stall(held_s=6), Fault(is_announced=True)], 6 + 0.5 + 4 + 8),
    ],
)
def test_each_fault_lowers_the_predicted_ettr(faults: list[Fault | Stall], more_s: float) -> None:
    found = predict_ettr(COSTS, faults, steps=1000, save_steps=100)
    assert found == pytest.approx(1000 / (QUIET_S + more_s))


def test_queueing_counts_and_a_run_without_steps_is_refused() -> None:
    found = predict_ettr(COSTS, [], steps=1000, save_steps=100, queued_s=60)
    assert found == pytest.approx(1000 / (QUIET_S + 60))
    with pytest.raises(ValueError, match="0 steps"):
        predict_ettr(COSTS, [], steps=0, save_steps=100)
