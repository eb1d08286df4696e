"""ISO times of the index, compared with Python's `datetime`."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.lineage.queries.views import iso

MILLISECOND_S = 1e-3
# Floats of this size are not more precise.
MARGIN_S = 2e-6


@given(st.floats(min_value=0.0, max_value=4e9))
@example(0.25)
@example(951782399.9999)
@example(951782400.0)
def test_a_time_is_rounded_down_to_the_millisecond(time: float) -> None:
    text = iso(time)
    assert text is not None
    moment = datetime.fromisoformat(text)
    assert moment.utcoffset() == timedelta(0)
    assert text == f"{moment.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
    assert -MARGIN_S <= time - moment.timestamp() <= MILLISECOND_S + MARGIN_S


@pytest.mark.parametrize("time", [-0.25, 3e11, math.inf, math.nan])
def test_a_number_that_is_no_time_says_so(time: float) -> None:
    text = iso(time)
    assert text is not None
    assert text.startswith("not a time: ")
