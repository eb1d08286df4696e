"""A real run with one rank whose data are slow: its heat map names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.local_runs import LocalRun, wait_until

from holdfast.api.series.heat import read_heat_map
from holdfast.api.series.models import HeatMap, HeatValue, TimeRange
from holdfast.contracts.states import AttemptState

PROGRAM = Path(__file__).with_name("loader_program.py")
STEPS = 60
ROW_S = 0.1
# Each rank has two rows of a batch.
STEP_S = 2 * ROW_S

pytestmark = [pytest.mark.more, pytest.mark.timeout(200)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    settings: dict[str, Any] = {
        "context": "fork",
        "sleep_s": 0.0,
        "steps": STEPS,
        "rows_s": {"1": ROW_S},
    }
    made = LocalRun(tmp_path, program=PROGRAM, **settings)
    yield made
    made.end_all()


def test_the_rank_with_slow_data_is_first_and_the_other_waits_for_it(run: LocalRun) -> None:
    attempt = run.submit()
    assert run.wait_for_end().state is AttemptState.COMPLETED

    def heat(value: HeatValue) -> HeatMap:
        within = TimeRange(None, None, 100)
        return read_heat_map("tried", attempt, value, within, range(4096))

    def whole() -> HeatMap | None:
        one = heat(HeatValue.STEP)
        return one if one.buckets * one.bucket_s >= 0.8 * STEPS * STEP_S else None

    # The agent writes its last row after it has said how the attempt ended.
    found = wait_until(whole, "the rows of all steps")
    assert (len(found.rows), found.ranks_total, found.problems) == (2, 2, [])
    assert [one.launch for one in found.launches] == [1]
    slow, fast = found.worst
    assert (slow.rank, fast.rank) == (1, 0)
    for one in (slow, fast):
        assert one.step_s is not None
        assert STEP_S * 0.9 <= one.step_s < 5 * STEP_S
    assert slow.data_s is not None
    assert slow.step_s is not None
    assert slow.data_s > 0.7 * slow.step_s
    assert fast.others_s is not None
    assert fast.step_s is not None
    assert fast.others_s > 0.5 * fast.step_s
    assert slow.is_straggler
