"""Loads at other shapes with real ranks: every value, every byte read once, damage found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.flusher_keeper import Keeper

from holdfast.contracts.digests import BLOCK_BYTES

PROGRAM = Path(__file__).parents[1] / "load_program.py"
RANKS_S = 200.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where two ranks saved a checkpoint of some 35 MB; `damaged` has a copy with a bit flipped."""
    folder = tmp_path_factory.mktemp("load")
    keeper = Keeper(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    try:
        run_ranks("save", 2, folder, keeper.name)
    finally:
        keeper.close()
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
    return folder / "r" / "checkpoints" / "step-00000001.a0001.i01"


def run_ranks(act: str, world_size: int, folder: Path, flusher: str) -> list[dict[str, float]]:
    """What rank 0 says of each load; every rank must have ended well."""
    root = Path(__file__).parents[2]
    search = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    where = [str(folder), flusher, str(checkpoint(folder))]
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, act, str(rank), str(world_size), *where],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=RANKS_S) for rank in ranks]
        errors = [error for _, error in said]
        assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)[-6000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(line) for line in said[0][0].splitlines() if line.startswith("{")]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_byte_is_read_once_at_any_shape(folder: Path, world_size: int) -> None:
    loads = run_ranks("load", world_size, folder, "")
    assert loads
    for one in loads:
        assert 0 < one["unique"] <= one["read"] <= one["ratio_max"] * one["unique"]
