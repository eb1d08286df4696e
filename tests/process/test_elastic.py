"""Checkpoints load bit-identically at every other layout and number of ranks, and back again.

Each process group loads the checkpoints of the earlier ones, compares them with the saved
values, and saves them in its own layouts.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from tests.support.elastic_layouts import layouts_of
from tests.support.flusher_supervisor import SlotHolder
from tests.support.rank_programs import run_program

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths

PHASE_S = 250.0
STORM_PHASE_S = 900.0


def run_phase(world_size: int, folder: Path, stride: int, timeout_s: float) -> int:
    """Load and save with one process group; returns the number of loads."""
    flusher_supervisor = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    try:
        arguments = (world_size, folder, flusher_supervisor.name, stride)
        said = run_program("support.elastic_program", *arguments, timeout_s=timeout_s)
    finally:
        flusher_supervisor.close()
    (loads,) = re.findall(rf"(\d+) loads at {world_size} ranks", said)
    return int(loads)


def check_manifests(folder: Path, world_size: int) -> None:
    """Each layout has one committed, undamaged checkpoint whose manifest records the mesh."""
    checkpoints = RunPaths(folder / f"n{world_size}").list_checkpoints()
    layouts = layouts_of(world_size).values()
    assert len(checkpoints) == len(layouts)
    for path, layout in zip(checkpoints, layouts, strict=True):
        manifest = read_manifest(path)
        assert manifest is not None
        assert find_damage(path, manifest) == []
        mesh = dict(zip(layout.names, layout.sizes[world_size], strict=True))
        assert manifest.topology["mesh"] == mesh
        assert manifest.topology["pipeline"] == mesh.get("pp", 1)


@pytest.mark.slow
def test_four_rank_checkpoints_load_on_two_and_one_ranks_and_back(tmp_path: Path) -> None:
    loads = [run_phase(n, tmp_path, 4, PHASE_S) for n in (4, 2, 1, 4)]
    assert loads[0] == 0
    assert min(loads[1:]) >= 5
    for world_size in (4, 2, 1):
        check_manifests(tmp_path, world_size)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_layout_loads_every_other_layout_on_1_to_8_ranks(tmp_path: Path) -> None:
    order, saved = (8, 4, 2, 1, 2, 4, 8), dict[int, int]()
    for world_size in order:
        own = len(layouts_of(world_size))
        others = sum(count for ranks, count in saved.items() if ranks != world_size)
        assert run_phase(world_size, tmp_path, 1, STORM_PHASE_S) == own * others
        saved[world_size] = own
        check_manifests(tmp_path, world_size)
