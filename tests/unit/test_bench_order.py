"""The order of measurements: each one in every place, and after every other, equally often."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from holdfast_bench.limits.ranks import balanced_order


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7])
def test_places_and_neighbours_are_balanced(count: int) -> None:
    rows = [balanced_order(count, row) for row in range(count * (1 + count % 2))]
    assert all(sorted(row) == list(range(count)) for row in rows)
    places = Counter(at for row in rows for at in enumerate(row))
    assert len(places) == count**2
    assert len(set(places.values())) == 1
    neighbours = Counter(pair for row in rows for pair in pairwise(row))
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) <= 1


def test_rows_repeat_after_the_last_one() -> None:
    assert balanced_order(6, 6) == balanced_order(6, 0)
    assert balanced_order(3, 6) == balanced_order(3, 0)
    assert balanced_order(3, 3) == balanced_order(3, 0)[::-1]
