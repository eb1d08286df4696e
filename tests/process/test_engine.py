"""The engine with real ranks: bit-exact at any world size, DCP compatibility, killed ranks."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.flusher_supervisor import SlotHolder, wait_until
from tests.support.rank_programs import kill_program, run_program, start_program
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.trainer.export.__main__ import main as export

RANKS_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def flusher_supervisor() -> Iterator[SlotHolder]:
    made = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def saved(folder: Path, flusher_supervisor: SlotHolder) -> Path:
    """A checkpoint of step 3 saved by two sharded ranks; `save-2.pt` has its state."""
    run_ranks("save", 2, folder, flusher_supervisor)
    return folder / "r" / "checkpoints" / "step-00000003.a0001.l01"


def run_ranks(
    scenario: str,
    world_size: int,
    folder: Path,
    flusher_supervisor: SlotHolder,
    checkpoint: Path = Path(),
) -> None:
    where = (folder, flusher_supervisor.name, checkpoint)
    run_program("support.checkpoint_program", scenario, world_size, *where, timeout_s=RANKS_S)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The states are bit-identical."""
    for part in ("model", "optimizer"):
        assert one[part].keys() == other[part].keys()
        for key, value in one[part].items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[part][key].dtype
                assert torch.equal(value, other[part][key]), key
            else:
                assert value == other[part][key], key


def flatten(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Convert an optimizer's state dict to the keys that a checkpoint has."""
    names: dict[int, str] = {}
    flat: dict[str, Any] = {}
    for group in optimizer["param_groups"]:
        own = dict(zip(group["params"], group["param_names"], strict=True))
        names |= own
        options = {k: v for k, v in group.items() if k not in {"params", "param_names"}}
        for name in own.values():
            flat |= {f"param_groups.{name}.{option}": v for option, v in options.items()}
    for number, state in optimizer["state"].items():
        flat |= {f"state.{names[number]}.{key}": value for key, value in state.items()}
    assert sorted(names) == list(range(len(names)))
    return flat


@pytest.mark.more
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_checkpoint_loads_bit_exact_at_any_world_size(
    saved: Path, folder: Path, flusher_supervisor: SlotHolder, world_size: int
) -> None:
    manifest = read_manifest(saved)
    assert manifest is not None
    assert find_damage(saved, manifest) == []
    assert manifest.world_size == 2
    assert 0 < manifest.blocked_s < 60
    run_ranks("load", world_size, folder, flusher_supervisor, saved)
    assert_same(torch.load(folder / "save-2.pt"), torch.load(folder / f"load-{world_size}.pt"))


@pytest.mark.more
def test_stock_dcp_reads_our_checkpoint(
    saved: Path, folder: Path, flusher_supervisor: SlotHolder
) -> None:
    run_ranks("stock_load", 2, folder, flusher_supervisor, saved)
    expected = torch.load(folder / "save-2.pt")
    assert_same(expected, torch.load(folder / "stock_load-2.pt"))
    dcp_to_torch_save(saved, folder / "converted.pt")
    converted = torch.load(folder / "converted.pt")
    assert_same(expected, converted)
    assert converted["rng"]["rank00001"].tolist() == [1] * 9


@pytest.mark.more
def test_export_equals_the_checkpoint_and_damage_leaves_no_output(
    saved: Path, folder: Path
) -> None:
    for form, name in (("torch", "export.pt"), ("dcp", "export")):
        assert export([str(saved), "--to", form, "--output", str(folder / name)]) == 0
    exported = torch.load(folder / "export.pt", weights_only=True)
    flat = exported | {"optimizer": flatten(exported["optimizer"])}
    assert_same(torch.load(folder / "save-2.pt"), flat)
    assert {path.name for path in (folder / "export").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    dcp_to_torch_save(folder / "export", folder / "exported.pt")
    assert_same(torch.load(folder / "save-2.pt"), torch.load(folder / "exported.pt"))
    shutil.copytree(saved, folder / "other" / "checkpoints" / saved.name)
    damaged = folder / "other" / "checkpoints" / saved.name / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for form in ("torch", "dcp", "hf"):
        output = folder / f"damaged-{form}"
        assert export([str(damaged.parent), "--to", form, "--output", str(output)]) == 1
        assert not output.exists()


@pytest.mark.more
def test_engine_reads_a_stock_dcp_checkpoint(folder: Path, flusher_supervisor: SlotHolder) -> None:
    run_ranks("stock_save", 2, folder, flusher_supervisor, folder / "stock")
    run_ranks("foreign_load", 2, folder, flusher_supervisor, folder / "stock")
    assert_same(torch.load(folder / "stock_save-2.pt"), torch.load(folder / "foreign_load-2.pt"))


@pytest.mark.more
def test_step_sealed_by_ranks_that_were_then_killed_is_committed(
    tmp_path: Path, flusher_supervisor: SlotHolder
) -> None:
    ranks = start_program(
        "support.checkpoint_program", "hold", 2, tmp_path, flusher_supervisor.name, ""
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "both ranks", RANKS_S)
        flusher_supervisor.signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        wait_until(lambda: len(list(tmp_path.glob("staged-*"))) == 2, "both seals", RANKS_S)
    finally:
        kill_program(ranks)
        flusher_supervisor.signal(signal.SIGCONT)
    flusher_supervisor.drain()
    directory = tmp_path / "r" / "checkpoints" / "step-00000004.a0001.l01"
    manifest = read_manifest(directory)
    assert manifest is not None
    assert find_damage(directory, manifest) == []
    # `.metadata`, built in the background, was sealed together with the other files.
    assert ".metadata" in {file.path for file in manifest.files}
    assert FileSystemReader(directory).read_metadata().storage_data
