"""The memory that a job may still use, by the least limit of its cgroups (v1 and v2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.contracts.node.memory import group_room
from holdfast.trainer import Session
from holdfast.trainer.planning import ranks
from holdfast.trainer.planning.layout import TRAIN_STATE_BYTES_MAX
from holdfast.trainer.planning.ranks import check_memory
from holdfast.trainer.ranks.collective import HierarchicalGroup
from holdfast.trainer.ranks.rank_tree import RankTree
from holdfast.trainer.slots.slots import SLOTS_PER_RANK

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


def test_slots_must_fit_the_limit_and_replaced_slots_count_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "group_room", lambda: 1000)
    tree = HierarchicalGroup(RankTree(), 0)
    check_memory(tree, 0, 1000 // SLOTS_PER_RANK, 0)
    with pytest.raises(Exception, match="staging slots"):
        check_memory(tree, 0, 1000, 0)
    check_memory(tree, 0, 1000, 1000 * SLOTS_PER_RANK)


def test_the_old_slots_count_as_free_when_the_state_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_bytes = 512 * 512 * 4
    # Two weights and one layer's moments are staged first, both layers' moments later: four
    # weights, then six. Six do not fit, unless the slots of the four count as free.
    rooms = [GIB, SLOTS_PER_RANK * (TRAIN_STATE_BYTES_MAX + 4 * weight_bytes)]
    monkeypatch.setattr(ranks, "group_room", lambda: rooms.pop(0))
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    with Session(model, optimizer, directory=tmp_path, interval=1) as session:
        for step in session.steps(4):
            model[0].requires_grad_(step > 2)
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert rooms == []
