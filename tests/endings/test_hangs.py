"""Recorded hangs, judged by the stacks alone and with the ranks' flight records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.endings.hangs import HANGS, HANGS_FOLDER, PREFIX, Hang, read_stacks
from tests.endings.test_endings import capture

from holdfast.trainer.flight_records import main, read_records
from holdfast.workers.agent.watch.collectives import CollectiveBlame, find_missing
from holdfast.workers.agent.watch.flight_recorder import read_summaries
from holdfast.workers.agent.watch.stack_text import find_blame

CAPTURES_BYTES_MAX = 100_000
MISSING = re.compile(r"missing: ranks? ([\d, ]+) at")
# The hangs in which the records change which ranks are named.
CHANGED = {
    # By the stacks, the ranks are in different collectives, and none is named.
    "skipped": ((), (1,)),
    # By the stacks, ranks 0 and 2 are missing. In truth rank 1 has another shape.
    "other_shape": ((0, 2), (1,)),
}


def by_records(folder: Path, ranks: int) -> CollectiveBlame | None:
    return find_missing(read_records(folder, PREFIX), ranks)


def by_stacks(folder: Path) -> tuple[int, ...]:
    finding = find_blame(read_stacks(folder), {})
    return tuple(int(one) for named in MISSING.findall(finding) for one in named.split(", "))


def check(hang: Hang, folder: Path) -> None:
    found = by_records(folder, hang.ranks)
    if not hang.quotes:
        assert found is None
        return
    assert found is not None
    assert found.ranks == hang.culprits, found.finding
    for quote in hang.quotes:
        assert quote in found.finding


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.name)
def test_the_records_of_a_hang_name_the_rank_the_collective_and_the_line(hang: Hang) -> None:
    records = read_records(HANGS_FOLDER / hang.name, PREFIX)
    assert [one.problem for one in records] == [""] * (hang.ranks - hang.silent)
    check(hang, HANGS_FOLDER / hang.name)


def test_the_records_change_the_verdict_of_some_hangs_and_make_none_worse() -> None:
    changed = {}
    for hang in HANGS:
        folder = HANGS_FOLDER / hang.name
        without, found = by_stacks(folder), by_records(folder, hang.ranks)
        with_records = found.ranks if found and found.ranks else without
        if without != with_records:
            changed[hang.name] = (without, with_records)
        assert with_records == hang.culprits, f"{hang.name}: {without} without the records"
    assert changed == CHANGED


def test_the_captures_are_small_and_complete() -> None:
    assert {path.name for path in HANGS_FOLDER.iterdir()} == {hang.name for hang in HANGS}
    files = [path for path in HANGS_FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < CAPTURES_BYTES_MAX


def test_a_nodes_summary_of_its_records_leads_to_the_same_finding(tmp_path: Path) -> None:
    for path in (HANGS_FOLDER / "asleep").glob(f"{PREFIX}*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert main([str(tmp_path), "--prefix", PREFIX]) == 0
    summaries = read_summaries(tmp_path)
    assert summaries is not None
    assert find_missing(summaries, 4) == by_records(HANGS_FOLDER / "asleep", 4)


@pytest.mark.more
def test_hangs_recorded_again_are_judged_the_same(tmp_path: Path) -> None:
    again = [hang for hang in HANGS if hang.name in {"other_shape", "stopped"}]
    capture(tmp_path, *(hang.name for hang in again))
    for hang in again:
        check(hang, tmp_path / HANGS_FOLDER.name / hang.name)
