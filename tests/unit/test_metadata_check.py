"""The check that boxes cover a tensor exactly once, in any number, order and dimensions."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from holdfast.trainer.format.metadata_check import tile

Box = tuple[tuple[int, ...], tuple[int, ...]]


def covered_once(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """The same check by brute force."""
    canvas = np.zeros(shape, dtype=int)
    for offsets, sizes in boxes:
        canvas[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return bool((canvas == 1).all())


def cut(chance: random.Random, box: Box) -> list[Box]:
    """Split a box in two along a random dimension; one part may be empty."""
    offsets, sizes = box
    dimension = chance.randrange(len(sizes))
    at = chance.randint(0, sizes[dimension])
    low, high = list(sizes), list(sizes)
    low[dimension], high[dimension] = at, sizes[dimension] - at
    begin = list(offsets)
    begin[dimension] += at
    return [(offsets, tuple(low)), (tuple(begin), tuple(high))]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_tile_agrees_with_brute_force(dimensions: int) -> None:
    chance = random.Random(dimensions)
    seen = []
    for _ in range(400):
        shape = tuple(chance.randint(0, 6) for _ in range(dimensions))
        whole = ((0,) * dimensions, shape)
        boxes: list[Box] = [whole]
        for _ in range(chance.randint(0, 4)):
            boxes += cut(chance, boxes.pop(chance.randrange(len(boxes))))
        if chance.random() < 0.5:
            # The number of elements is the same, but some are in two boxes and some in none.
            moved = chance.randrange(len(boxes))
            sizes = boxes[moved][1]
            room = [w - s for w, s in zip(shape, sizes, strict=True)]
            boxes[moved] = (tuple(chance.randint(0, r) for r in room), sizes)
        chance.shuffle(boxes)
        seen.append(tile(boxes, whole))
        assert seen[-1] is covered_once(boxes, shape), boxes
    assert 50 < sum(seen) < 395


def test_a_grid_with_a_missing_or_repeated_box_is_incomplete() -> None:
    whole = ((0, 0), (80, 60))
    grid = [((4 * i, 3 * j), (4, 3)) for i in range(20) for j in range(20)]
    assert tile(grid, whole)
    assert not tile(grid[1:], whole)
    assert not tile([*grid[1:], grid[5]], whole)
    assert tile([((), ())], ((), ()))
    assert not tile([((), ()), ((), ())], ((), ()))
    assert not tile([], ((), ()))


def test_checking_forty_thousand_boxes_takes_at_most_seconds() -> None:
    boxes = [((i, j, 0), (1, 1, 2)) for i in range(200) for j in range(200)]
    began = time.monotonic()
    assert tile(boxes, ((0, 0, 0), (200, 200, 2)))
    assert not tile([*boxes[:-1], boxes[0]], ((0, 0, 0), (200, 200, 2)))
    assert time.monotonic() - began < 5
