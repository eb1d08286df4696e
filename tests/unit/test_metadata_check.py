"""Boxes that share an element are found, however many dimensions and whatever their order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from holdfast.trainer.planning.metadata_check import overlap_any

Box = tuple[tuple[int, ...], tuple[int, ...]]


def painted_twice(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """The same by brute force."""
    canvas = np.zeros(shape, dtype=int)
    for offsets, sizes in boxes:
        canvas[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return bool((canvas > 1).any())


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_it_says_what_painting_says(dimensions: int) -> None:
    chance = random.Random(dimensions)
    seen = set()
    for _ in range(300):
        shape = tuple(chance.randint(1, 6) for _ in range(dimensions))
        boxes: list[Box] = []
        for _ in range(chance.randint(0, 4)):
            offsets = tuple(chance.randint(0, whole) for whole in shape)
            sizes = tuple(chance.randint(0, w - o) for w, o in zip(shape, offsets, strict=True))
            boxes.append((offsets, sizes))
        assert overlap_any(boxes) is painted_twice(boxes, shape), boxes
        seen.add(overlap_any(boxes))
    assert seen == {True, False}


def test_a_grid_has_no_overlap_and_a_scalar_saved_twice_has() -> None:
    grid = [((4 * i, 3 * j), (4, 3)) for i in range(20) for j in range(20)]
    assert overlap_any(grid) is False
    assert overlap_any([*grid, ((78, 58), (1, 1))]) is True
    assert overlap_any([((), ())]) is False
    assert overlap_any([((), ()), ((), ())]) is True
