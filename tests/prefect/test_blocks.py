"""Blocks of Prefect that a spec names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples.demo_service import PrefectService
from tests.support.flow_runs import FlowRuns, wait_for_end

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import RunRecord, read_document


@pytest.mark.more
def test_a_spec_takes_its_defaults_and_its_root_from_blocks(
    runs: FlowRuns, service: PrefectService, tmp_path: Path
) -> None:
    root, kept = tmp_path / "elsewhere", tmp_path / "kept"
    kept.mkdir()
    cluster = {"executor": "local", "gpus_per_node": 1, "setup": ["export FROM_BLOCK=1"]}
    runs.create_block("holdfast-cluster", "here", **cluster)
    runs.create_block("holdfast-storage", "scratch", root=str(root), directory=str(kept))
    blocks = {"cluster": "here", "storage": "scratch"}
    path = runs.write_spec("blocks", {"steps": 20, "sleep_s": 0.0}, blocks=blocks)
    spec = json.loads(path.read_text())
    wrong = ["holdfast", "submit", str(path), "--set", "blocks.cluster=there"]
    refused = service.command(*wrong, check=False)
    assert refused.returncode != 0
    assert "no block holdfast-cluster/there" in refused.stderr
    assert "it has: holdfast-cluster/here, holdfast-storage/scratch" in refused.stderr
    assert not root.exists()
    runs.holdfast("submit", str(path))
    paths = RunPaths(root / "blocks")
    runs.made.append(paths)
    wait_for_end(paths)
    record = read_document(RunRecord, paths.spec)
    assert record is not None
    # The spec's own values have precedence over the block's.
    assert record.spec["resources"]["gpus_per_node"] == spec["resources"]["gpus_per_node"] == 2
    assert record.spec["launch"]["setup"] == ["export FROM_BLOCK=1"]
    assert record.spec["checkpoint"]["directory"] == str(kept)
    assert any(kept.rglob("manifest.json"))
