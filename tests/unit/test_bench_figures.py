"""The arithmetic of the benchmark, and its raw reads and writes on a small scale."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from holdfast_bench.limits import figures
from holdfast_bench.limits.files import (
    SMALL_FILES,
    create_small,
    drop_cache,
    read_files,
    resident_pages,
    share_out,
    sizes_of,
    write_files,
)

STAGING: dict[str, list[float]] = {"raw_write": [0.5, 1.0, 0.5]}
for _times, _staging in enumerate(figures.STAGING_MODES, start=1):
    STAGING[f"{_staging}.memcpy"] = [0.1, 0.2, 0.1]
    STAGING[f"{_staging}.blocked"] = [0.1 * _times, 0.2 * _times, 0.3 * _times]
    STAGING[f"{_staging}.committed"] = [0.5, 2.0 * _times, 0.5 * _times]
    STAGING[f"{_staging}.product_alone"] = [0.002, 0.002, 0.002]
    STAGING[f"{_staging}.product_during_write"] = [0.004, 0.002, 0.004]
STARTS = [
    {
        "first.blocked": [first],
        "first.committed": [0.6],
        "save.blocked": [0.1, 0.1, 0.2],
        "save.committed": [0.5, 0.6, 0.7],
        "memcpy": [0.1],
        "raw_write": [0.5],
        "prepare": [10 * first],
    }
    for first in (0.2, 0.1, 0.4)
]
PAIRS = {
    "memcpy": [0.1, 0.2, 0.1],
    "raw_write": [0.5, 1.0, 0.5],
    "raw_read": [0.4, 0.4, 0.4],
    "creates": [0.01, 0.01, 0.03],
    "tail": [0.01, 0.02, 0.02],
    "save.blocked": [0.11, 0.24, 0.10],
    "save.committed": [0.5, 1.1, 0.6],
    "load": [0.4, 0.8, 0.6],
    "load_bytes": [100.0, 102.0, 101.0],
    "stock.load": [1.2, 1.2, 1.2],
    "stock.load_bytes": [200.0, 200.0, 200.0],
}
for _mode, _number in itertools.product(figures.STOCK_MODES, ("blocked", "committed")):
    PAIRS[f"stock.{_mode}.{_number}"] = [0.3, 0.6, 0.3]
    PAIRS[f"first.stock.{_mode}.{_number}"] = [0.9]


OVERLAP = {
    "memcpy": [0.1, 0.2, 0.1],
    "blocked": [0.01, 0.01, 0.02],
    "step_alone": [0.2, 0.2, 0.4],
    "step_during_copy": [0.21, 0.2, 0.48],
    "product_alone": [0.002, 0.002, 0.004],
    "product_during_write": [0.004, 0.004, 0.005],
}
FREE_CORE = {
    "step_alone": [0.2, 0.2, 0.4],
    "step_during_copy": [0.2, 0.206, 0.4],
    "product_alone": [0.002],
    "product_during_write": [0.002],
}
FREE_CORE |= {f"{figures.PEER}.{name}": values for name, values in FREE_CORE.items()}
FREE_CORE[f"{figures.PEER}.step_during_copy"] = [0.3, 0.3, 0.6]
NEIGHBOURS = {
    "off": [0.2, 0.1, 0.2],
    "on": [0.21, 0.11, 0.24],
    "off_waiting": [0.2, 0.2, 0.2],
    "on_waiting": [0.2, 0.202, 0.21],
}
OVERLAP |= {f"{figures.PEER}.{name}": values for name, values in OVERLAP.items()}
OVERLAP |= {"limited.product_alone": [0.004], "limited.product_during_write": [0.005]}
OVERLAP[f"{figures.PEER}.blocked"] = [0.3, 0.6, 0.3]


def found(peer_version: str | None = "0.1.1") -> figures.Found:
    resharded = {"load": [1.0], "raw_read": [0.8], "load_bytes": [104.0]}
    return figures.Found(
        pairs=PAIRS,
        overlap=OVERLAP,
        peer_version=peer_version,
        starts=STARTS,
        signals=[1.1, 1.3, 1.2],
        narrowed=resharded,
        widened=resharded | {"load_bytes": [110.0]},
        staging=STAGING,
        free_core=FREE_CORE,
        neighbours=NEIGHBOURS,
        endurance={"step_overhead_us": [7.0], "memory_growth": [-0.001]},
        unique_bytes=100,
    )


def test_staging_modes_and_neighbours_are_compared_in_their_own_pairs() -> None:
    answer = figures.answer(found())
    assert list(answer["staging"]) == ["memory", "single", "disk"]
    disk = answer["staging"]["disk"]
    assert (disk["save_blocked"], disk["save_committed"]) == (3.0, 3.0)
    assert disk["throughput_during_write"] == 0.5
    assert disk["spread"]["save_blocked"]["max"] == 9.0
    assert answer["neighbours"]["step_time"] == 1.1
    assert answer["neighbours"]["step_time_waiting"] == 1.01
    assert answer["seconds"]["neighbours.on"]["max"] == 0.24
    assert answer["seconds"]["staging.disk.blocked"]["n"] == 3


def test_ratios_are_medians_of_pairwise_quotients() -> None:
    answer = figures.answer(found())
    assert answer["ratios"] == {
        "save_blocked": 1.1,
        "save_overlapped": 0.1,
        "save_committed": 1.1,
        "first_save": 2.0,
        "load": 1.5,
        "load_bytes_same": 1.01,
        "load_bytes_resharded": 1.1,
        "signal_to_commit": 1.2,
        "commit_tail": 0.5,
        "step_overhead_us": 7.0,
        "memory_growth": -0.001,
    }
    medians = {name: values["median"] for name, values in answer["setup"].items()}
    assert medians == pytest.approx({"prepare_s": 2.0, "prepare": 20.0})
    assert answer["spread"]["save_blocked"] == {"min": 1.0, "median": 1.1, "max": 1.2, "n": 3}
    assert answer["spread"]["first_save_committed"]["median"] == 1.0
    assert answer["seconds"]["pairs.load"] == {"min": 0.4, "median": 0.6, "max": 0.8, "n": 3}
    assert answer["seconds"]["starts.first.blocked"]["n"] == 3


def test_stock_dcp_modes_use_the_same_ratios() -> None:
    stock = figures.answer(found())["stock"]
    assert set(stock) == {*figures.STOCK_MODES, "load", figures.PEER}
    for mode in figures.STOCK_MODES:
        ratios = {name: value for name, value in stock[mode].items() if name != "spread"}
        assert ratios == {"save_blocked": 3.0, "save_committed": 0.6, "first_save": 3.0}
    assert (stock["load"]["load"], stock["load"]["load_bytes_same"]) == (3.0, 2.0)


def test_the_peer_has_the_ratios_of_overlapped_saves() -> None:
    answer = figures.answer(found())
    peer = answer["stock"][figures.PEER]
    assert (peer["version"], peer["save_blocked"]) == ("0.1.1", 3.0)
    for one in (peer, answer["training"]):
        assert (one["step_time_during_copy"], one["throughput_during_write"]) == (1.05, 0.5)
    assert answer["training"]["throughput_during_limited_write"] == 0.8
    free = answer["free_core"]
    assert free["step_time_during_copy"] == 1.0
    assert free[figures.PEER]["step_time_during_copy"] == 1.5
    assert figures.PEER not in figures.answer(found(None))["free_core"]
    assert "make bench" in figures.answer(found(None))["stock"][figures.PEER]["missing"]


@pytest.mark.parametrize(
    ("signalled_at", "rest"), [(9.5, 0.5), (10.0, 0.0), (10.2, 0.8), (12.0, 0.0)]
)
def test_rest_of_step_is_the_time_from_the_signal_to_the_end_of_its_step(
    signalled_at: float, rest: float
) -> None:
    assert figures.rest_of_step([10.0, 11.0], signalled_at) == pytest.approx(rest)


def test_signal_to_commit_is_relative_to_the_limits_of_its_own_run() -> None:
    ratio = figures.signal_ratio(
        signalled_at=10.0, committed_at=11.2, step_ends=[9.0, 10.2], start=STARTS[0]
    )
    assert ratio == pytest.approx(1.2 / (0.2 + 0.1 + 0.5))


def test_raw_writes_create_files_with_the_given_names_and_sizes(tmp_path: Path) -> None:
    sizes = {"a": 40_000_000, "pp0/b": 5, "pp0/c": 0}
    image = memoryview(os.urandom(sum(sizes.values())))
    write_files(tmp_path, sizes, image)
    assert sizes_of(tmp_path) == sizes
    assert (tmp_path / "a").read_bytes() == image[:40_000_000]
    target = bytearray(len(image))
    read_files(tmp_path, sizes, memoryview(target))
    assert target == image
    with pytest.raises(OSError, match="5 bytes early"):
        read_files(tmp_path, {"pp0/b": 10}, memoryview(target))


def test_files_are_divided_evenly_by_size() -> None:
    sizes = {"__0_0.distcp": 100, "__1_0.distcp": 90, ".metadata": 8, "train_state.json": 1}
    shares = share_out(sizes, 2)
    assert [sum(share.values()) for share in shares] == [100, 99]
    assert shares[0] | shares[1] == sizes


def test_resident_pages_counts_cached_pages(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1_000_000))
    with open(path, "rb") as stream:
        pages = resident_pages(stream.fileno())
    assert (len(pages), sum(pages)) == (245, 245)
    assert 0.0 <= drop_cache([path]) <= 1.0


def test_create_small_creates_new_files_each_time(tmp_path: Path) -> None:
    numbers = itertools.count()
    create_small(tmp_path, numbers)
    create_small(tmp_path, numbers)
    assert len(list(tmp_path.iterdir())) == 2 * SMALL_FILES
