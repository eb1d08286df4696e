"""Ranks and GPUs over time: bounded files of each node, their damage, and the heat map of them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.series import add_ranks, header, write_gpus, write_ranks

from holdfast.api.series.gpus import read_gpus
from holdfast.api.series.heat import ALPHABET, LEVELS, encode, read_heat_map
from holdfast.api.series.models import HeatMap, HeatValue, TimeRange
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.workers.nodes.gpus import GpuBeat
from holdfast.workers.nodes.series import (
    GPU_FIELDS,
    RANK_FIELDS,
    ROWS_KEPT,
    ROWS_MAX,
    RankTimes,
    SeriesRow,
    SeriesWriter,
    merge,
    thin,
)
from holdfast.workers.nodes.series_reading import (
    COUNT_MAX,
    list_series,
    parse_series,
    read_series,
)

T0 = 1_764_000_000.0
WHOLE = TimeRange(None, None, 500)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    return AttemptPaths(tmp_path / "attempts" / "0001")


def even(rank: int, _: int) -> RankTimes:
    return RankTimes(1.0, 0.125, 0.25)


def heat(attempt: AttemptPaths, value: HeatValue = HeatValue.STEP, **more: Any) -> HeatMap:
    within = more.pop("within", WHOLE)
    ranks = more.pop("ranks", range(4096))
    return read_heat_map("run", attempt, value, within, ranks)


def cells(found: HeatMap) -> np.ndarray[Any, Any]:
    """The values of a heat map, as its reader computes them."""
    level = np.array([[ALPHABET.index(one) for one in row] for row in found.rows], dtype=float)
    return np.where(level == 0, np.nan, found.lowest_s * found.ratio ** (level - 1))


# --- bounded files ------------------------------------------------------------------------------


def test_a_month_fits_and_the_last_hour_keeps_its_resolution() -> None:
    width_s, rows, total = 60.0, list[SeriesRow](), 0.0
    for minute in range(30 * 24 * 60):
        value = 1.0 + minute % 7
        total += value
        rows.append(SeriesRow(T0 + minute * width_s, width_s, 1, 0, (value, 0.0, 0.0)))
        if len(rows) >= ROWS_MAX:
            rows = thin(rows, RANK_FIELDS)
    assert len(rows) < ROWS_MAX
    assert all(one.end == pytest.approx(two.start) for one, two in itertools.pairwise(rows))
    assert [row.width_s for row in rows[-60:]] == [width_s] * 60
    assert max(row.width_s for row in rows) < 24 * 3600
    mean = sum(row.values[0] * row.width_s for row in rows) / (rows[-1].end - rows[0].start)
    assert mean == pytest.approx(total / (30 * 24 * 60))


def test_rows_of_two_launches_are_never_merged_and_the_oldest_give_way() -> None:
    rows = [SeriesRow(T0 + n, 1.0, n, 0, (1.0, 0.0, 0.0)) for n in range(ROWS_MAX)]
    kept = thin(rows, RANK_FIELDS)
    assert kept == rows[-ROWS_KEPT:]
    moved = [SeriesRow(T0 + n, 1.0, 1, n % 2, (float(n % 2), 0.0, 0.0)) for n in range(ROWS_MAX)]
    assert {row.values[0] - row.first_rank for row in thin(moved, RANK_FIELDS)} == {0.0}


def test_a_merge_keeps_peaks_counts_and_faults() -> None:
    one = SeriesRow(T0, 10.0, 1, 0, (50.0, 10.0, 60.0, 300.0, 1.0, 79.0))
    two = SeriesRow(T0 + 10, 30.0, 1, 0, (90.0, 20.0, 50.0, math.nan, 2.0, 0.0))
    assert merge(one, two, GPU_FIELDS).values == (80.0, 20.0, 60.0, 300.0, 3.0, 79.0)


def test_a_full_file_is_replaced_by_a_shorter_one(attempt: AttemptPaths) -> None:
    write_ranks(attempt, even, start=T0, buckets=ROWS_MAX + 5, width_s=5.0)
    ((_, path),) = list_series(attempt, "ranks")
    (found,), problems = read_series([path], "ranks")
    assert problems == []
    assert len(found.start) <= ROWS_KEPT + 6
    assert (found.start[0], found.end[-1]) == (T0, T0 + (ROWS_MAX + 5) * 5)
    assert np.all(found.start[1:] >= found.end[:-1])


def test_a_clock_that_steps_back_delays_the_rows_and_overlaps_none(attempt: AttemptPaths) -> None:
    writer = write_ranks(attempt, even, start=T0, buckets=3)
    add_ranks(writer, even, start=T0 - 3600, buckets=range(3), ranks=range(2))
    add_ranks(writer, even, start=T0 + 60, buckets=range(2), ranks=range(2))
    (found,), _ = read_series([path for _, path in list_series(attempt, "ranks")], "ranks")
    assert list(found.start - T0) == [0, 10, 20, 30, 40, 50, 60, 70]


def test_a_row_that_was_written_in_part_is_written_again(
    attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, write = write_ranks(attempt, even, start=T0, buckets=2), os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, content[:7]))
    with pytest.raises(OSError, match="only a part"):
        add_ranks(writer, even, start=T0, buckets=[2], ranks=range(2))
    monkeypatch.undo()
    ((_, path),) = list_series(attempt, "ranks")
    assert len(parse_series(path.read_bytes(), "ranks").start) == 2
    add_ranks(writer, even, start=T0, buckets=[3], ranks=range(2))
    assert list(parse_series(path.read_bytes(), "ranks").start - T0) == [0, 10, 20, 30]


def test_another_agent_of_the_same_node_has_a_file_of_its_own(attempt: AttemptPaths) -> None:
    write_ranks(attempt, even, start=T0, buckets=2)
    write_ranks(attempt, even, start=T0 + 20, buckets=2)
    assert [path.name for _, path in list_series(attempt, "ranks")] == [
        "ranks-0000.1.bin",
        "ranks-0000.2.bin",
    ]
    assert heat(attempt).buckets == 40
    assert not np.isnan(cells(heat(attempt))).any()


# --- damage and bad files -----------------------------------------------------------------------


def _zeros(path: Path) -> None:
    content = bytearray(path.read_bytes())
    begin = content.index(b"\n") + 1
    content[begin : begin + 20] = bytes(20)
    path.write_bytes(content)


def _not_numbers(path: Path) -> None:
    content = bytearray(path.read_bytes())
    begin = content.index(b"\n") + 1
    # NaN as its start, and an infinite width in the next row.
    content[begin : begin + 8] = b"\0\0\0\0\0\0\xf8\x7f"
    content[begin + 40 : begin + 44] = b"\0\0\x80\x7f"
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "rows"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 5), 3),
        (_zeros, 3),
        (_not_numbers, 2),
    ],
    ids=["torn", "zeros", "numbers"],
)
def test_damaged_rows_are_left_out(
    attempt: AttemptPaths, damage: Callable[[Path], None], rows: int
) -> None:
    write_ranks(attempt, even, start=T0, buckets=4)
    ((_, path),) = list_series(attempt, "ranks")
    damage(path)
    (found,), problems = read_series([path], "ranks")
    assert (len(found.start), problems) == (rows, [])
    assert np.nanmax(cells(heat(attempt))) == pytest.approx(1.0, rel=0.05)


def test_values_that_cannot_be_count_as_absent(attempt: AttemptPaths) -> None:
    odd = {0: RankTimes(-1.0, math.inf, math.nan), 1: RankTimes(1e9, 0.0, 0.0)}
    write_ranks(attempt, lambda rank, _: odd[rank], start=T0, buckets=3)
    found = cells(heat(attempt))
    assert np.isnan(found[0]).all()
    assert found[1] == pytest.approx(65504, rel=0.05)


def _big(path: Path) -> None:
    with open(path, "wb") as stream:
        stream.truncate(1 << 40)


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "has no header"),
    "text": (lambda path: path.write_bytes(b"hello\nworld"), "the header is damaged"),
    "kind": (
        lambda path: path.write_bytes(header("gpus", 2).model_dump_json().encode() + b"\n"),
        "2 gpus in format 1; expected 1 to 1024 ranks",
    ),
    "count": (
        lambda path: path.write_bytes(header("ranks", 10**8).model_dump_json().encode() + b"\n"),
        "100000000 ranks",
    ),
    "nested": (lambda path: path.write_bytes(b"[" * 100_000 + b"\n"), "the header is damaged"),
    "sparse": (_big, "bytes, expected"),
    "link": (_link, "link"),
    "pipe": (_pipe, "not a regular file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_named_and_the_others_are_shown(attempt: AttemptPaths, case: str) -> None:
    make, problem = HOSTILE[case]
    write_ranks(attempt, even, start=T0, buckets=4)
    write_ranks(attempt, even, start=T0, buckets=4, node=1)
    make(attempt.series / "ranks-0000.1.bin")
    found = heat(attempt)
    (text,) = found.problems
    assert text.startswith("ranks-0000.1.bin: ")
    assert problem in text
    assert [host.host for host in found.hosts] == ["node-1"]
    assert np.isnan(cells(found)[:2]).all()
    assert cells(found)[2:] == pytest.approx(1.0)


def test_foreign_names_and_a_claim_of_the_highest_rank_cost_nothing(attempt: AttemptPaths) -> None:
    write_ranks(attempt, even, start=T0, buckets=2)
    for name in ("ranks-1.bin", "ranks-0000.1.bin.tmp", "notes", "ranks-99999999.1.bin"):
        (attempt.series / name).write_bytes(b"x")
    writer = SeriesWriter(attempt.series, header("ranks", COUNT_MAX, 7))
    values = (1.0, 0.0, 0.0) * COUNT_MAX
    writer.append(SeriesRow(T0, 10.0, 1, 2**32 - 1, values))
    found = heat(attempt)
    assert found.problems == []
    assert len(found.rows) == 4096
    assert not np.isnan(cells(found)[:2]).any()


def test_an_attempt_without_series_has_an_empty_heat_map(attempt: AttemptPaths) -> None:
    found = heat(attempt)
    assert (found.buckets, found.rows, found.worst, found.hosts) == (0, [], [], [])
    assert read_gpus("run", attempt, None, WHOLE).gpus == []


# --- the heat map -------------------------------------------------------------------------------


def test_ranks_that_move_between_launches_keep_their_rows_apart(attempt: AttemptPaths) -> None:
    """After a node is lost, the other one has the ranks from 0 on. The world is smaller."""
    node = {0: 1.0, 1: 3.0}
    write_ranks(attempt, lambda *_: RankTimes(node[0], 0, 0), start=T0, buckets=10)
    writer = write_ranks(attempt, lambda *_: RankTimes(node[1], 0, 0), start=T0, buckets=10, node=1)
    add_ranks(
        writer,
        lambda *_: RankTimes(9.0, 0, 0),
        start=T0 + 200,
        buckets=range(10),
        ranks=range(2),
        launch=2,
    )
    found = heat(attempt, within=TimeRange(None, None, 30))
    values = cells(found)
    assert found.ranks_total == 4
    assert values[:2, :10] == pytest.approx(1.0, rel=0.05)
    assert values[2:, :10] == pytest.approx(3.0, rel=0.05)
    assert np.isnan(values[:, 10:20]).all()
    assert values[:2, 20:] == pytest.approx(9.0, rel=0.05)
    assert np.isnan(values[2:, 20:]).all()
    assert [(one.launch, one.start_s) for one in found.launches] == [(1, T0), (2, T0 + 200)]
    assert [(one.first_rank, one.host) for one in found.hosts] == [(0, "node-1"), (2, "node-1")]


def test_the_values_are_those_of_a_step_and_wide_rows_fill_their_buckets(
    attempt: AttemptPaths,
) -> None:
    write_ranks(attempt, even, start=T0, buckets=3, width_s=100.0)
    wanted = {
        HeatValue.STEP: 1.0,
        HeatValue.DATA: 0.125,
        HeatValue.OTHERS: 0.25,
        HeatValue.OWN: 0.75,
    }
    for value, expected in wanted.items():
        found = heat(attempt, value, within=TimeRange(T0 + 50, T0 + 250, 40))
        assert (found.buckets, found.bucket_s, found.start_s) == (40, 5.0, T0 + 50)
        assert cells(found) == pytest.approx(expected, rel=0.05)


def test_a_part_of_the_ranks_is_numbered_from_its_first(attempt: AttemptPaths) -> None:
    for node in range(4):
        write_ranks(
            attempt, lambda rank, _: RankTimes(1.0 + rank, 0, 0), start=T0, buckets=2, node=node
        )
    found = heat(attempt, ranks=range(3, 6))
    assert (found.first_rank, found.ranks_total, len(found.rows)) == (3, 8, 3)
    assert cells(found)[:, 0] == pytest.approx([4, 5, 6], rel=0.1)
    assert {one.rank for one in found.worst} == {3, 4, 5}


def test_the_rank_that_keeps_others_waiting_comes_first(attempt: AttemptPaths) -> None:
    def times(rank: int, bucket: int) -> RankTimes:
        if rank == 5 and bucket >= 50:
            return RankTimes(2.0, 1.5, 0.0)
        return RankTimes(2.0 if bucket >= 50 else 1.0, 0.0, 1.2 if bucket >= 50 else 0.2)

    for node in range(4):
        write_ranks(attempt, times, start=T0, buckets=100, node=node)
    first, second = heat(attempt, within=TimeRange(None, None, 100)).worst[:2]
    assert (first.rank, first.host, first.slow_share) == (5, "node-2", 0.5)
    assert first.data_s == pytest.approx(0.75, rel=0.01)
    assert first.own_s == pytest.approx(1.4, rel=0.01)
    assert first.peers_s == pytest.approx(0.8, rel=0.01)
    assert (first.is_straggler, second.is_straggler, second.slow_share) == (True, False, 0)


# --- GPUs ---------------------------------------------------------------------------------------


def test_gpus_over_time_have_peaks_and_the_codes_of_new_errors(attempt: AttemptPaths) -> None:
    def gpu(bucket: int, index: int) -> GpuBeat:
        is_hot = index == 1 and bucket == 5
        return GpuBeat(
            index=index,
            uuid=f"GPU-{index}",
            memory_used_bytes=(10 + bucket) << 30,
            memory_total_bytes=80 << 30,
            utilisation_percent=90,
            temperature_c=85 if is_hot else 60,
            power_w=None if index == 0 else 400,
            ecc_uncorrected=0 if bucket < 5 else 2,
            xids=(79,) if bucket >= 5 else (),
            xids_seen=1 if bucket >= 5 else 0,
        )

    beats = [tuple(gpu(bucket, index) for index in range(2)) for bucket in range(10)]
    write_gpus(attempt, beats, start=T0)
    write_gpus(attempt, beats, start=T0, node=3)
    found = read_gpus("run", attempt, None, TimeRange(None, None, 5))
    assert ([one.node for one in found.nodes], found.node, found.buckets) == ([0, 3], 0, 5)
    one, two = found.gpus
    assert (one.uuid, one.memory_total_bytes) == ("GPU-0", 80 << 30)
    assert two.temperature_c == [60, 60, 85, 60, 60]
    assert one.memory_bytes[-1] == 19 << 30
    assert (one.power_w, two.power_w) == ([None] * 5, [400] * 5)
    assert one.ecc_errors == [0, 0, 2, 0, 0]
    assert one.xids == [0, 0, 79, 0, 0]
    assert read_gpus("run", attempt, 3, WHOLE).nodes[1].host == "node-3"


def test_noise_around_the_usual_value_is_one_level_and_a_slower_rank_another() -> None:
    draw = np.random.default_rng(7)
    for usual in (0.013, 0.987, 41.0):
        values = (usual * draw.normal(1.0, 0.015, (64, 100))).astype(np.float32)
        values[5] *= 1.2
        lowest, ratio, rows = encode(values)
        level = np.array([[ALPHABET.index(one) for one in row] for row in rows])
        shown = lowest * ratio ** (level - 1)
        assert np.isclose(np.median(shown), np.median(values), rtol=1e-6)
        assert (level[:5] == level[0, 0]).mean() > 0.99
        assert (level[5] >= level[0, 0] + 1).all()
        assert (np.abs(np.log(shown / values)) <= np.log(ratio) / 2 * 1.001).all()


def test_values_of_all_sizes_have_levels() -> None:
    values = np.geomspace(1e-6, 10.0, 400, dtype=np.float32).reshape(20, 20)
    lowest, ratio, rows = encode(values)
    level = np.array([[ALPHABET.index(one) for one in row] for row in rows])
    assert (level.min(), level.max() <= LEVELS) == (1, True)
    assert np.isclose(lowest * ratio ** (level.max() - 1), 10.0, rtol=ratio - 1)
