"""Custom save planners in Holdfast's engine; stock DCP reads the resulting checkpoints."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dcp.planners import DdpLoadBalancing, Doubled, Fp16, RenameOnSave, SaveExtraData
from tests.dcp.testbed import Testbed, assert_same, flat_state, zeros
from tests.support.checkpoint_program import make_identity
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SaveError
from holdfast.trainer.format.metadata import open_checkpoint
from holdfast.trainer.saving.engine import CheckpointEngine


def save_planner_examples(testbed: Testbed) -> None:
    """The four examples of `SavePlanner`, which plan every save again."""
    directory = save(testbed, "rename", RenameOnSave(), flat_state(0), flat_state(1))
    expect(testbed, directory, {f"foo_{key}": value for key, value in flat_state(1).items()})
    directory = save(testbed, "fp16", Fp16(), testbed.state()["model"])
    expect(testbed, directory, {key: v.half() for key, v in testbed.state()["model"].items()})
    directory = save(testbed, "balanced", DdpLoadBalancing(), flat_state(0))
    assert len(list(directory.glob("*.distcp"))) == testbed.world_size
    expect(testbed, directory, flat_state(0))
    planner = SaveExtraData(flatten_state_dict=False)
    directory = save(testbed, "extra", planner, flat_state(0))
    expect(testbed, directory, flat_state(0))
    kept = open_checkpoint(directory).metadata.planner_data
    assert kept == ["per-rank-data"] * testbed.world_size


def save_planner_options(testbed: Testbed) -> None:
    """`DefaultSavePlanner` uses cached plans; a derived planner is called at every save."""
    directory = save(testbed, "default", DefaultSavePlanner(), testbed.state())
    expect(testbed, directory, testbed.state())
    doubled = Doubled()
    directory = save(testbed, "doubled", doubled, flat_state(0))
    expected = {k: v * 2 if torch.is_tensor(v) else v for k, v in flat_state(0).items()}
    expect(testbed, directory, expected)
    asked = dist.get_world_size() * [None]
    dist.all_gather_object(asked, len(doubled.__dict__.get("looked_up", ())))
    assert sum(count or 0 for count in asked) >= len(expected)


def save_planner_refused(testbed: Testbed) -> None:
    """Objects that only a pickle could hold are refused on all ranks; nothing is written."""
    state = {"t": torch.ones(3), "when": datetime.date(2020, 1, 1)}
    with pytest.raises(SaveError, match="when"):
        save(testbed, "refused", RenameOnSave(), state)
    assert not list(testbed.place("refused").glob("**/manifest.json"))


def save(testbed: Testbed, name: str, planner: SavePlanner, *states: dict[str, Any]) -> Path:
    """Save each state by an engine with `planner`; returns the last checkpoint's directory."""
    run = RunPaths(testbed.place(name))
    identity = make_identity(testbed.rank, testbed.world_size)
    engine = CheckpointEngine(
        flusher=testbed.flusher, run=run, identity=identity, group=testbed.group, planner=planner
    )
    try:
        for step, state in enumerate(states, start=1):
            assert engine.save(state, {}, step=step, reason="interval", parent=None)
            (result,) = engine.wait(120)
            assert result.committed, result.error
    finally:
        engine.close()
    dist.barrier()
    return run.checkpoint(result.checkpoint)


def expect(testbed: Testbed, directory: Path, expected: dict[str, Any]) -> None:
    """Both stock DCP and Holdfast read exactly this."""
    assert read_manifest(directory) is not None
    for load in ("stock", "ours"):
        state = zeros(expected)
        if load == "stock":
            state_dict_loader.load(state, checkpoint_id=directory)
        else:
            testbed.load(directory, state)
        assert_same(state, expected)


CHECKS = (save_planner_examples, save_planner_options, save_planner_refused)
