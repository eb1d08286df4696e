"""Buckets of logged metrics: bounded, and the same for every way of reading the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lineage.ingest.metrics import BUCKETS_MAX, MetricSeries, parse_line, thin

STEPS = st.integers(min_value=0, max_value=5000)
VALUES = st.one_of(st.floats(-9, 9), st.just("nan"))


def write(path: Path, steps: range) -> None:
    lines = [{"step": step, "time": 1.0 * step, "loss": float(step)} for step in steps]
    with open(path, "a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_long_metrics_file_becomes_few_buckets_that_keep_the_extremes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(10_000))
    with open(path, "a") as stream:
        stream.write('{"step": 10000, "time": 1e4, "loss": 99999}\n{"step": 10001, "ti')
    series = MetricSeries()
    series.read(path)
    assert series.stride == 32, "the smallest power of two with few enough buckets"
    assert 1 + 10_000 // 32 == len(series.buckets) <= BUCKETS_MAX
    assert series.buckets[0].data["loss"] == (31, 31.0, 0.0, 31.0)
    assert max(b.data["loss"][3] or 0 for b in series.buckets.values()) == 99999
    assert series.offset < path.stat().st_size, "the torn line is read later"
    assert thin(series.lasts("loss"), 4)[-1] == 99999


@given(
    lines=st.lists(st.tuples(STEPS, st.dictionaries(st.sampled_from("ab"), VALUES)), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_reading_metrics_in_parts_equals_reading_them_at_once(
    lines: list[tuple[int, dict[str, float | str]]],
    cuts: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """This also holds with steps out of order and with growing bucket widths."""
    path = tmp_path_factory.mktemp("parts") / "metrics.jsonl"
    text = [json.dumps({"step": step, "time": 0.5, **values}) + "\n" for step, values in lines]
    grown = MetricSeries(buckets_max=5)
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        with open(path, "a") as stream:
            stream.writelines(text[begin:end])
        grown.read(path)
    whole = MetricSeries(buckets_max=5)
    whole.read(path)
    assert (grown.offset, grown.stride, grown.buckets) == (
        whole.offset,
        whole.stride,
        whole.buckets,
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1]",
        b"nonsense",
        b'{"step": 1}',
        b'{"step": -1, "time": 1}',
        b'{"step": true, "time": 1}',
        b'{"step": 1, "time": NaN}',
        b'{"step": 1' + b"0" * 30 + b', "time": 1}',
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_not_metrics_is_skipped(line: bytes) -> None:
    assert parse_line(line) is None


def test_non_finite_values_are_counted_and_invalid_ones_dropped() -> None:
    line = b'{"step": 1, "time": 2, "a": "inf", "b": [1], "c\\u0000": 1' + b"0" * 400 + b', "d": 3}'
    bucket = parse_line(line)
    assert bucket
    assert bucket.data == {"a": (1, None, None, None), "d": (1, 3.0, 3.0, 3.0)}
