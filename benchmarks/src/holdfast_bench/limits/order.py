"""The order of operations in each pair, chosen so that each follows each other equally often."""

from __future__ import annotations


def balanced_order(count: int, row: int) -> list[int]:
    """Return the numbers from 0 to `count` - 1 in the order of pair number `row`, from 0.

    Over `count` rows (2 × `count` if it is odd), each number has each position equally often and
    directly follows each other number equally often. Changing only the first operation would not do
    this, and a write after a long write meets a slower disk. Source: E. J. Williams, "Experimental
    designs balanced for the estimation of residual effects of treatments", Australian Journal of
    Scientific Research A 2 (1949).
    """
    first = [
        (place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)
    ]
    order = [(number + row) % count for number in first]
    return order[::-1] if count % 2 and (row // count) % 2 else order
