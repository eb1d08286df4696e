"""Loads at other world sizes with real ranks: correct values, each byte read once, damage found."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.flusher_supervisor import SlotHolder
from tests.support.rank_programs import run_program

from holdfast.contracts.disk.digests import BLOCK_BYTES

RANKS_S = 200.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a checkpoint of about 35 MB by two ranks, and a damaged copy in `damaged`."""
    folder = tmp_path_factory.mktemp("load")
    flusher_supervisor = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    try:
        run_ranks("save", 2, folder, flusher_supervisor.name)
    finally:
        flusher_supervisor.close()
    copy = folder / "damaged" / checkpoint(folder).name
    shutil.copytree(checkpoint(folder), copy)
    with open(copy / "__1_0.distcp", "r+b") as stream:
        stream.seek(BLOCK_BYTES + BLOCK_BYTES // 2)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 16]))
    yield folder
    shutil.rmtree(folder)


def checkpoint(folder: Path) -> Path:
    return folder / "r" / "checkpoints" / "step-00000001.a0001.l01"


def run_ranks(act: str, world_size: int, folder: Path, flusher: str) -> list[dict[str, float]]:
    """Rank 0's report of each load; every rank must succeed."""
    where = (folder, flusher, checkpoint(folder))
    said = run_program("support.load_program", act, world_size, *where, timeout_s=RANKS_S)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


@pytest.mark.more
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_byte_is_read_once_at_any_world_size(folder: Path, world_size: int) -> None:
    loads = run_ranks("load", world_size, folder, "")
    assert loads
    for one in loads:
        assert 0 < one["unique"] <= one["read"] <= one["ratio_max"] * one["unique"]


@pytest.mark.more
def test_load_works_when_only_some_ranks_created_extra_groups(tmp_path: Path) -> None:
    said = run_program("support.node_groups_program", tmp_path, timeout_s=60.0)
    assert said.count("restored 1, all ranks of its node share") == 4
