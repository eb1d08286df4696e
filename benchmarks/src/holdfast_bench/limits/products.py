"""Matrix products, as work of a rank whose speed shows what else the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from holdfast_bench.limits.ranks import Program

MATRIX_WIDTH: Final = 256
# The products between two looks at the clock or the disk: 20 ms on a core.
COUNT: Final = 50


def rotation() -> torch.Tensor:
    """Return a matrix whose products keep their size, with shape (`MATRIX_WIDTH`, `MATRIX_WIDTH`).

    Those of smaller random numbers become denormal, and on some processors forty times as slow.
    """
    matrix: torch.Tensor = torch.linalg.qr(torch.randn(MATRIX_WIDTH, MATRIX_WIDTH))[0]
    return matrix


class Products:
    """One thread of products in each rank. Times are the slowest rank's seconds of a product."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._matrix = rotation()

    def multiply(self, count: int) -> None:
        """Compute `count` products."""
        product = self._matrix
        for _ in range(count):
            product = self._matrix @ product

    def seconds_for(self, seconds: float) -> float:
        """Return the time of a product over `seconds`."""
        end = time.perf_counter() + seconds
        return self.seconds_until(lambda: time.perf_counter() >= end)

    def seconds_until(self, is_over: Callable[[], bool]) -> float:
        """Return the time of a product until `is_over`, of at least `COUNT` of them."""
        self._program.meet()
        done, began = 0, time.perf_counter()
        while not done or not is_over():
            self.multiply(COUNT)
            done += COUNT
        return self._program.slowest((time.perf_counter() - began) / done)
