"""A load never writes outside the memory of its targets, even if its plan is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.loading.plan import CopySeries
from holdfast.trainer.loading.read import copy_out, scatter
from holdfast.trainer.loading.targets import MemoryTarget

PIECE = bytes(range(1, 65))


def inside(before: int, size: int) -> tuple[np.ndarray, MemoryTarget]:
    """Memory with a target of `size` bytes in it, after `before` bytes that must stay zero."""
    memory = np.zeros(before + size + 172, np.uint8)
    target = MemoryTarget(lambda: memory[before : before + size])
    return memory, target


def test_part_with_strides_that_fits_exactly_is_copied() -> None:
    memory, target = inside(64, 20)
    copy_out([(CopySeries(100, 0, 4, 3, 16, 8), target)], memoryview(PIECE), 100)
    assert memory[64:84].tolist() == [
        *PIECE[0:4], *[0] * 4, *PIECE[16:20], *[0] * 4, *PIECE[32:36]
    ]  # fmt: skip
    assert not memory[:64].any()
    assert not memory[84:].any()


@pytest.mark.parametrize(
    "series",
    [
        CopySeries(100, 1, 4, 3, 16, 8),
        CopySeries(100, 0, 4, 3, 16, 9),
        CopySeries(100, 0, 5, 3, 16, 8),
        CopySeries(100, 0, 4, 3, 16, -8),
        CopySeries(100, -1, 4),
        CopySeries(100, 17, 4),
        CopySeries(100, 20, 4),
    ],
)
def test_part_outside_its_memory_is_refused_and_nothing_is_written(series: CopySeries) -> None:
    memory, target = inside(64, 20)
    with pytest.raises(CheckpointError, match=r"of a memory of 20 bytes; expected bytes inside"):
        copy_out([(series, target)], memoryview(PIECE), 100)
    assert not memory.any()


@pytest.mark.parametrize(
    "series", [CopySeries(99, 0, 4), CopySeries(161, 0, 4), CopySeries(100, 0, 4, 4, 21, 5)]
)
def test_part_outside_the_piece_of_the_file_is_refused(series: CopySeries) -> None:
    memory, target = inside(64, 20)
    with pytest.raises(CheckpointError, match=r"from a piece with bytes 100 to 164"):
        copy_out([(series, target)], memoryview(PIECE), 100)
    assert not memory.any()


def test_direct_read_outside_its_memory_is_refused() -> None:
    _, target = inside(64, 8192)
    with pytest.raises(CheckpointError, match=r"of a memory of 8192 bytes"):
        scatter([(CopySeries(0, 4097, 4096), target)], 0, 8192, memoryview(bytearray(8192)))
