"""The order of acts in each pair, so that what one leaves behind meets all others alike."""

from __future__ import annotations


def balanced_order(count: int, row: int) -> list[int]:
    """The numbers from 0 to `count` - 1 in the order of pair number `row`, both counted from 0.

    Over `count` rows (twice as many where it is odd) each number stands in each place equally
    often, and comes right after each other number equally often: a write that follows a long one
    meets a slower disk, so merely beginning with another act would leave the neighbours as they
    are. Source: E. J. Williams, "Experimental designs balanced for the estimation of residual
    effects of treatments", Australian Journal of Scientific Research A 2 (1949).
    """
    first = [
        (place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)
    ]
    order = [(number + row) % count for number in first]
    return order[::-1] if count % 2 and (row // count) % 2 else order
