"""Byte ranges of a load, compared with array slicing, and which rank reads which unit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.trainer.loading.plan import (
    NOBODY,
    PIECE_BYTES,
    Chunk,
    CopySeries,
    FileUnits,
    Unit,
    assign,
    clip,
    cut,
    overlap,
    pieces,
    series_between,
)

ITEM_BYTES = 2


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Chunk, Chunk]:
    """A small tensor's shape and two boxes of it, either of which may be empty."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    found = []
    for _ in range(2):
        offsets, sizes = [], []
        for length in shape:
            low = draw(st.integers(0, length))
            offsets.append(low)
            sizes.append(draw(st.integers(0, length - low)))
        found.append(Chunk(tuple(offsets), tuple(sizes)))
    return shape, found[0], found[1]


def take(array: np.ndarray, chunk: Chunk) -> np.ndarray:
    """A copy of the box of `array`."""
    where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
    return np.array(array[where], order="C")


def move(series: list[CopySeries], source: bytes, target: np.ndarray) -> int:
    """Copy the ranges of a plan one at a time; return the number of bytes."""
    moved = 0
    for one in series:
        for index in range(one.count):
            at = one.source + index * one.source_stride
            to = one.target + index * one.target_stride
            assert 0 <= at <= at + one.length <= len(source)
            target[to : to + one.length] = np.frombuffer(source[at : at + one.length], np.uint8)
            moved += one.length
        assert one.bytes == one.length * one.count
    return moved


@pytest.mark.more
@settings(deadline=None, max_examples=300)
@given(case=boxes(), unit_bytes=st.integers(1, 40), gap=st.integers(0, 30))
def test_the_bytes_read_equal_array_slicing(
    case: tuple[tuple[int, ...], Chunk, Chunk], unit_bytes: int, gap: int
) -> None:
    shape, saved, wanted = case
    whole = np.arange(1, int(np.prod(shape)) + 1, dtype=np.int16).reshape(shape)
    content = bytes(gap) + take(whole, saved).tobytes()
    file = FileUnits("f", len(content), 7, unit_bytes, None)
    expected = np.zeros(wanted.sizes, np.int16)
    if (box := overlap(saved, wanted)) is not None:
        inside = tuple(
            slice(b - o, b - o + n)
            for b, o, n in zip(box.offsets, wanted.offsets, box.sizes, strict=True)
        )
        expected[inside] = take(whole, box)
    target = np.zeros(expected.size * ITEM_BYTES, np.uint8)
    bytes_moved = 0
    for series in series_between(saved, wanted, ITEM_BYTES):
        for number, parts in cut(series.moved(gap), file):
            unit = file.unit(number)
            for part in parts:
                assert unit.start <= part.source < part.end <= unit.start + unit.size
            bytes_moved += move(parts, content, target)
    assert np.array_equal(target.view(np.int16).reshape(wanted.sizes), expected)
    assert bytes_moved == (int(np.prod(box.sizes)) * ITEM_BYTES if box else 0)


def test_clipping_a_series_to_a_range() -> None:
    comb = CopySeries(source=100, target=0, length=10, count=3, source_stride=50, target_stride=10)
    assert clip(comb, 0, 100) == clip(comb, 110, 150) == clip(comb, 210, 999) == []
    assert clip(comb, 105, 205) == [
        CopySeries(105, 5, 5),
        CopySeries(150, 10, 10, 1, 50, 10),
        CopySeries(200, 20, 5),
    ]


def test_columns_of_a_matrix_are_one_series_for_any_number_of_rows() -> None:
    rows = Chunk((0, 0), (5000, 64))
    (series,) = series_between(rows, Chunk((0, 16), (5000, 16)), 4)
    assert series == CopySeries(64, 0, 64, 5000, 256, 64)
    (series,) = series_between(rows, Chunk((1000, 0), (9, 64)), 4)
    assert series == CopySeries(1000 * 256, 0, 9 * 256)
    # A cut in the middle dimension gives two outer loops, of which at most one is enumerated.
    blocks = series_between(Chunk((0, 0, 0), (4, 8, 8)), Chunk((0, 2, 2), (4, 4, 4)), 1)
    assert [one.count for one in blocks] == [4] * 4


def test_a_unit_is_read_in_pieces_that_cover_it() -> None:
    unit = Unit("f", 3, 2 * PIECE_BYTES + 5, None)
    assert list(pieces(unit)) == [
        (3, PIECE_BYTES),
        (3 + PIECE_BYTES, PIECE_BYTES),
        (3 + 2 * PIECE_BYTES, 5),
    ]
    file = FileUnits("f", 25, 10, 10, ("a", "b", "c"))
    assert [file.unit(number) for number in range(10, 10 + file.count)] == [
        Unit("f", 0, 10, "a"),
        Unit("f", 10, 10, "b"),
        Unit("f", 20, 5, "c"),
    ]


@pytest.mark.parametrize(
    ("wanted", "owner"),
    [
        ([[1, 1, 0, 0]], [0, 0, NOBODY, NOBODY]),
        ([[1, 1, 0], [0, 0, 1]], [0, 0, 1]),
        # Both ranks want two units: the rank with fewer units of its own reads them.
        ([[1, 1, 1, 1, 0], [0, 0, 1, 1, 0]], [0, 0, 1, 1, NOBODY]),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], [0, 1, 0, 1]),
        # A rank that wants nothing reads for the others.
        ([[1, 1, 1], [1, 1, 1], [0, 0, 0]], [0, 1, 2]),
    ],
)
def test_each_unit_is_read_by_one_rank(wanted: list[list[int]], owner: list[int]) -> None:
    flags = np.array(wanted, dtype=np.bool_)
    sizes = np.full(flags.shape[1], 100, dtype=np.int64)
    assert assign(flags, sizes).tolist() == owner
