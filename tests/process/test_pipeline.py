"""Pipeline stages save together: a folder per stage that stock DCP reads, and one manifest."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.flusher_supervisor import SlotHolder
from tests.support.rank_programs import run_program
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.trainer.export.__main__ import main as export
from holdfast.trainer.format.metadata import parse_metadata

RANKS_S = 240.0
WORLD_SIZE = 4


@pytest.mark.more
def test_each_pipeline_stage_has_a_stock_dcp_folder_under_one_manifest(tmp_path: Path) -> None:
    flusher_supervisor = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    try:
        run_program(
            "support.pipeline_program",
            WORLD_SIZE,
            tmp_path,
            flusher_supervisor.name,
            timeout_s=RANKS_S,
        )
    finally:
        flusher_supervisor.close()
    directory = tmp_path / "r" / "checkpoints" / "step-00000002.a0001.l01"
    manifest = read_manifest(directory)
    assert manifest is not None
    assert find_damage(directory, manifest) == []
    assert {entry.path for entry in manifest.files} == {
        *(f"pp{stage}/.metadata" for stage in (0, 1)),
        *(f"pp{stage}/__{rank}_0.distcp" for stage in (0, 1) for rank in (0, 1)),
        "train_state.json",
    }
    assert manifest.topology["pipeline"] == 2
    assert manifest.topology["mesh"] == {"pp": 2, "dp": 2}
    for stage in (0, 1):
        expected = torch.load(tmp_path / f"stage{stage}.pt")
        check_stage(directory / f"pp{stage}", expected)
        metadata = parse_metadata((directory / f"pp{stage}" / ".metadata").read_bytes(), "stage")
        assert {key for key in metadata.state_dict_metadata if key.startswith("rng.")} == {
            f"rng.rank{2 * stage + rank:05d}" for rank in (0, 1)
        }
    # Exports have no stages.
    whole = tmp_path / "whole"
    assert export([str(directory), "--to", "dcp", "--output", str(whole)]) == 0
    for stage in (0, 1):
        expected = torch.load(tmp_path / f"stage{stage}.pt")
        # State that belongs to single ranks is not shared.
        check_stage(whole, {part: expected[part] for part in expected if part != "rng"})


def check_stage(directory: Path, expected: dict[str, Any]) -> None:
    """Stock DCP loads a stage's folder bit-identically."""
    state = {
        part: {k: torch.zeros_like(v) if torch.is_tensor(v) else 0 for k, v in entries.items()}
        for part, entries in expected.items()
    }
    load_with_dcp(state, checkpoint_id=directory, no_dist=True)
    for part, entries in expected.items():
        assert entries
        for key, value in entries.items():
            found = state[part][key]
            if isinstance(value, torch.Tensor):
                assert isinstance(found, torch.Tensor)
                assert torch.equal(found, value), key
            else:
                assert found == value, key
