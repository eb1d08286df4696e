"""Holdfast's `Fabric`: interrupted programs equal plain Fabric's, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch
from lightning.fabric.strategies import FSDPStrategy
from tests.frameworks import fabric_program
from tests.frameworks.lightning_cases import count_equal, everywhere
from tests.support.rank_programs import run_program
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, SequentialLR

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import SpecError
from holdfast.trainer.frameworks import lightning as drop_in
from holdfast.trainer.frameworks.lightning import Fabric
from holdfast.trainer.frameworks.lightning.fabric_drop_in import check_strategy, schedulers_of

EXAMPLE: Final = Path(fabric_program.__file__).parents[2] / "examples" / "fabric"
# Kind → cases: a signal, a place, its number there, the steps between checkpoints. An epoch of
# "plain" has batches 0 to 5.
# A `RandomSampler` draws at the end of its pass from a generator that the program gave it, so
# "alone" stops at the last batch.
QUICK: Final = {
    "plain": [["kill", "batch", 9, 2], ["term", "batch", 5, 100]],
    "alone": [["term", "batch", 10, 100]],
}
PLACES: Final = range(2, 12)


@pytest.mark.more
def test_interrupted_programs_equal_those_of_plain_fabric(tmp_path: Path) -> None:
    """Samples, losses, rates, random numbers, evaluations and the final weights."""
    expected = sum(map(len, QUICK.values()))
    assert count_equal("fabric_program", QUICK, tmp_path, timeout_s=300) == expected


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    """On one rank, which torchrun starts. Its last checkpoint has the metric of its test."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    ended = subprocess.run(
        [*torchrun, str(EXAMPLE / "train.py"), "--accelerator", "cpu", "--epochs", "2"],
        cwd=tmp_path,
        env={**os.environ, "HOLDFAST_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "epoch 2: accuracy" in ended.stdout
    last = read_manifest(RunPaths(tmp_path / "train").list_checkpoints()[-1])
    assert last is not None
    assert last.step == 2 * 1024 // 16
    assert last.metrics["accuracy"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(fabric_program.KINDS))
def test_every_kind_is_interrupted_everywhere(kind: str, tmp_path: Path) -> None:
    cases = everywhere(PLACES)
    assert count_equal("fabric_program", {kind: cases}, tmp_path, timeout_s=590) == len(cases)


@pytest.mark.more
def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    said = run_program("frameworks.fabric_refusals", str(tmp_path), timeout_s=300)
    found = json.loads(said.splitlines()[-1])
    expected = {
        "loop_over_a_range": "SpecError: an optimizer step outside of a loop over fabric.epochs(n)",
        "loader_that_is_not_set_up": "SpecError: an optimizer step outside of a loop over a prepa",
        "loader_without_length": "SpecError: an optimizer step in a loop over a loader over Stream",
        "nothing_set_up": "SpecError: 0 models and 0 optimizers are set up; expected fabric.setup",
        "model_set_up_late": "SpecError: Linear is prepared after the run has resumed",
        "name_registered_twice": "SpecError: fabric.register(ema=...): this name is taken",
        "step_without_synchronized_gradients": "SpecError: a step of SGD while the gradients of",
        "second_loop": "SpecError: a second training in this program: its loop over fabric.epochs",
        "second_fabric": "SpecError: a second training in this program",
        "another_dataset": "CheckpointError: extra.fabric: FabricProgress.load_state_dict refused",
        "checkpoint_of_another_program": "CheckpointError: other:step-00000001.a0000.l01 was not",
    }
    assert {name: found[name][: len(text)] for name, text in expected.items()} == expected
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn"])
def test_processes_that_fabric_starts_are_refused(strategy: str) -> None:
    with pytest.raises(SpecError, match="Fabric would start 2 processes itself; start the program"):
        Fabric(accelerator="cpu", devices=2, strategy=strategy)


def test_an_unsupported_strategy_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="the strategy FSDPStrategy is not supported; use one of"):
        check_strategy(FSDPStrategy())


def test_schedulers_of_all_kinds_are_found_in_the_order_of_their_creation() -> None:
    mine, other = (torch.optim.SGD([torch.ones(1)], lr=0.1) for _ in range(2))
    first = LambdaLR(mine, lambda step: 1.0)
    second = ReduceLROnPlateau(mine)
    LambdaLR(mine, lambda step: 1.0)
    of_other = LambdaLR(other, lambda step: 1.0)
    both = SequentialLR(mine, [first, LambdaLR(mine, lambda step: 1.0)], milestones=[2])
    found = schedulers_of([mine])
    assert [found[0], found[1], found[-1]] == [first, second, both]
    assert len(found) == 4
    assert schedulers_of([other]) == [of_other]


def test_the_module_has_the_names_of_lightning_and_of_its_fabric() -> None:
    assert drop_in.seed_everything.__module__ == "lightning.fabric.utilities.seed"
    assert drop_in.LightningModule.__name__ == "LightningModule"
    assert drop_in.fabric.strategies.DDPStrategy.__name__ == "DDPStrategy"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        drop_in.nothing  # noqa: B018
