"""The memory that a job may still use, by the least limit of its cgroups (v1 and v2)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.contracts.errors import SaveError
from holdfast.contracts.node.limits import group_room
from holdfast.trainer import Session
from holdfast.trainer.planning import ranks
from holdfast.trainer.planning.ranks import check_memory
from holdfast.trainer.ranks.collective import HierarchicalGroup
from holdfast.trainer.ranks.rank_tree import RankTree
from holdfast.trainer.slots.modes import Staging
from holdfast.trainer.slots.slots import DATA_OFFSET, SLOTS_PER_RANK

GIB = 1 << 30


def group(folder: Path, version: int, limit: str, usage: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    limit_name, usage_name, total = names if version == 1 else ("memory.max", "memory.current", "")
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{usage}\n")
    stat = f"shmem 99999999999\n{total}inactive_file {cache - 1}\n{total}active_file 1\n"
    (folder / "memory.stat").write_text(stat)


def test_cgroup_v2_room_is_the_least_of_all_parent_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    group(tmp_path / "fs" / "job", 2, str(8 * GIB), 5 * GIB, GIB)
    assert group_room(own, tmp_path / "fs") == 4 * GIB
    group(tmp_path / "fs" / "job" / "step", 2, "max", 5 * GIB, GIB)
    assert group_room(own, tmp_path / "fs") == 4 * GIB


def test_cgroup_v1_room_is_read_from_the_memory_hierarchy(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/x\n3:memory:/slurm/job_7\n0::/\n")
    group(tmp_path / "fs" / "memory" / "slurm" / "job_7", 1, str(6 * GIB), 5 * GIB, 3 * GIB)
    group(tmp_path / "fs" / "memory" / "slurm", 1, str(1 << 63), 5 * GIB, GIB)
    assert group_room(own, tmp_path / "fs") == 4 * GIB


def test_room_is_none_without_a_memory_limit(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert group_room(own, tmp_path / "fs") is None
    own.write_text("0::/job\n")
    assert group_room(own, tmp_path / "fs") is None


def test_slots_must_fit_the_limit_and_the_error_names_what_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "group_room", lambda: 1000)
    tree = HierarchicalGroup(RankTree(), 0)
    check_memory(tree, 0, 1000 // SLOTS_PER_RANK)
    with pytest.raises(SaveError, match=r"2 staging slots .* GiB are free") as caught:
        check_memory(tree, 0, 1000, Staging("memory", str(tmp_path)))
    assert "checkpoint.staging = 'single' fits" in str(caught.value)
    assert f"checkpoint.staging = 'disk' fits: it needs 0.00 GiB in {tmp_path}" in str(caught.value)
    check_memory(tree, 0, 1000, Staging("single"))
    with pytest.raises(SaveError, match="1 staging slot for") as caught:
        check_memory(tree, 0, 1001, Staging("single", str(tmp_path)))
    assert "'single' fits" not in str(caught.value)
    check_memory(tree, 0, 1001, Staging("disk", str(tmp_path)))


def slot_bytes() -> int:
    """The bytes of memory of all slots that this process keeps for its flusher."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "holdfast-slot" in os.readlink(f"/proc/self/fd/{name}"):
                found += os.stat(f"/proc/self/fd/{name}").st_blocks * 512
    return found


@pytest.mark.parametrize("staging", ["memory", "single"])
def test_the_old_slots_are_free_before_the_new_ones_are_checked(
    staging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    # Of other tests in this process.
    before = slot_bytes()

    def room() -> int:
        kept.append(slot_bytes() - before)
        return GIB

    monkeypatch.setattr(ranks, "group_room", room)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    with Session(model, optimizer, directory=tmp_path, interval=1, staging=staging) as session:
        for step in session.steps(4):
            model[0].requires_grad_(step > 2)
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert slot_bytes() - before > 4 * 512 * 512 * 4
    assert len(kept) == 2
    # Of a freed slot, its head remains.
    assert kept[1] <= SLOTS_PER_RANK * DATA_OFFSET
