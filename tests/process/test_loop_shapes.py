"""Common shapes of training loops, interrupted at various points, resume bit-identically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.loop_shapes import SHAPES
from tests.support.rank_programs import run_program

CASE_S = 10.0
CASES_MAX = 200


def interrupt(
    shape: str, folder: Path, *, ranks: int, interval: str, snapshots: str, stride: int
) -> dict[str, Any]:
    """The result of `tests.support.loop_cases`: the number of cases and those with differences."""
    arguments = (shape, ranks, interval, snapshots, stride, folder / "cases")
    said = run_program("support.loop_cases", *arguments, timeout_s=60 + CASE_S * CASES_MAX / stride)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.more
@pytest.mark.parametrize(
    ("shape", "ranks", "stride"),
    [
        ("imagenet", 2, 23),
        ("mingpt", 1, 29),
        ("nanogpt", 1, 29),
        ("trainer", 1, 23),
        ("accelerate", 1, 29),
    ],
)
def test_interrupted_loops_resume_bit_identical(
    shape: str, ranks: int, stride: int, tmp_path: Path
) -> None:
    found = interrupt(shape, tmp_path, ranks=ranks, interval="4", snapshots="off", stride=stride)
    assert found["different"] == []
    assert found["cases"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "interval", "snapshots"), [(1, "3", "off"), (2, "5", "1")])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_loops_interrupted_at_any_point_resume_bit_identical(
    shape: str, ranks: int, interval: str, snapshots: str, tmp_path: Path
) -> None:
    found = interrupt(
        shape, tmp_path, ranks=ranks, interval=interval, snapshots=snapshots, stride=1
    )
    assert found["different"] == []
    assert found["cases"] >= 80
