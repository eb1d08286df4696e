"""A killed training run resumes bit-identically.

One run is never interrupted. A second one is killed in the middle of a step and loses everything
outside of its run folder; then the identical command continues it. The tests compare the two for
the usual mistakes of checkpoints and resumes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process import exact_program
from tests.process.exact_program import GLOBAL_BATCH, OVERFLOW_STEP, SAMPLES, SWA_START
from tests.support import forked
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.journal import EventKind, read_journal
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.spec.keep_rules import kept_by_rules
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.process.flusher_supervisor import listener_of

PROGRAM = Path(exact_program.__file__)
RANKS = 2
STEPS = 24
INTERVAL = 5
WAIT_S = 150.0
POLL_S = 0.05
KILL_SEED = 20

pytestmark = pytest.mark.timeout(600)


@dataclasses.dataclass(frozen=True)
class CompletedRun:
    """A completed run and the output of its launches."""

    run: RunPaths
    outputs: tuple[str, ...]

    def lines(self, rank: int) -> list[dict[str, Any]]:
        text = (self.run.directory / "records" / f"rank{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """The lines of all steps; for steps done twice, the later line."""
        last = {line["step"]: line for line in self.lines(rank) if "step" in line}
        return [last[step] for step in sorted(last)]

    def end(self, rank: int) -> dict[str, Any]:
        (line,) = [line for line in self.lines(rank) if "end" in line]
        return line

    def column(self, name: str, rank: int = 0) -> list[Any]:
        return [line[name] for line in self.steps(rank)]

    def resumes(self) -> list[dict[str, Any]]:
        events, _ = read_journal(self.run.attempt(0).rank_journal)
        return [event.data for event in events if event.kind is EventKind.RESUMED]

    def newest(self) -> Path:
        return self.run.list_checkpoints()[-1]


def launch(directory: Path, kill_at: int = 0) -> str:
    """Launch the identical command once; returns its output."""
    settings = json.dumps({"steps": STEPS, "directory": str(directory)})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    env |= {"HOLDFAST_CHECKPOINT_INTERVAL": str(INTERVAL), "OMP_NUM_THREADS": "1"}
    done = forked.run(
        [*command, PROGRAM, settings],
        env=env | {"EXACT_KILL_AT": str(kill_at)},
        timeout=WAIT_S,
    )
    assert (done.returncode == 0) == (kill_at == 0), done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_for_flusher(run: RunPaths, launch: int) -> None:
    give_up = time.monotonic() + WAIT_S
    while listener_of(run.attempt(0).flusher_address(launch, 0)) is not None:
        assert time.monotonic() < give_up
        time.sleep(POLL_S)


def train(directory: Path, kills: list[int]) -> CompletedRun:
    """Train to the end, killed within each of the steps `kills`."""
    outputs = [launch(directory, step) for step in kills]
    return CompletedRun(RunPaths(directory), (*outputs, launch(directory)))


def name_of(checkpoint: Path) -> CheckpointName:
    name = CheckpointName.parse(checkpoint.name)
    assert name is not None
    return name


def add_torn_checkpoint(checkpoint: Path, run: RunPaths) -> Path:
    """Add a newer, incomplete checkpoint as a kill leaves it: half a file and no manifest."""
    name = name_of(checkpoint)
    torn = run.checkpoint(str(dataclasses.replace(name, step=name.step + 2)))
    shutil.copytree(checkpoint, torn)
    (torn / "manifest.json").unlink()
    os.truncate(torn / "__0_0.distcp", (torn / "__0_0.distcp").stat().st_size // 2)
    return torn


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    return train(tmp_path_factory.mktemp("whole") / "run", [])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    """Killed at a random step; then resumed with nothing but the run folder."""
    folder = tmp_path_factory.mktemp("killed")
    run = RunPaths(folder / "run")
    kill_at = random.Random(KILL_SEED).randrange(2 * INTERVAL, STEPS)
    first = launch(run.directory, kill_at)
    wait_for_flusher(run, 1)
    add_torn_checkpoint(run.list_checkpoints()[-1], run)
    shutil.move(run.directory, folder / "durable")
    shutil.copytree(folder / "durable", run.directory)
    shutil.rmtree(folder / "durable")
    return CompletedRun(run, (first, launch(run.directory)))


def assert_identical(resumed: CompletedRun, whole: CompletedRun) -> None:
    for rank in range(RANKS):
        assert resumed.steps(rank) == whole.steps(rank)
        assert resumed.end(rank) == whole.end(rank)


def test_full_state_is_restored_bit_identical(whole: CompletedRun, killed: CompletedRun) -> None:
    assert_identical(killed, whole)
    assert set(killed.end(0)) > {"model", "moments", "torch", "python", "numpy", "best", "counter"}
    restored = killed.resumes()[-1]["restored"]
    extras = ["ema", "swa", "scaler", "counter", "generator"]
    assert restored == [
        *("model", "optimizer", "scheduler.0", "scheduler.1"),
        *(f"extra.{name}" for name in extras),
        "rng",
    ]


def test_half_written_checkpoint_is_never_used(killed: CompletedRun) -> None:
    step = killed.resumes()[-1]["step"]
    (torn,) = [p for p in killed.run.list_checkpoints() if read_manifest(p) is None]
    assert name_of(torn).step > step
    assert f"skipped {torn.name}: never committed" in killed.outputs[-1]
    for path in killed.run.list_checkpoints():
        manifest = read_manifest(path)
        assert manifest is None or find_damage(path, manifest) == []


def test_identical_command_resumes_without_extra_arguments(killed: CompletedRun) -> None:
    first, second = killed.resumes()
    assert (first["checkpoint"], first["step"]) == (None, 0)
    assert second["step"] >= 2 * INTERVAL
    assert first["argv"] == second["argv"]
    assert first["command_digest"] == second["command_digest"]
    assert not any("resume" in word for word in first["argv"])


def test_resume_needs_only_the_run_folder(killed: CompletedRun) -> None:
    # The fixture removed everything else.
    name = killed.resumes()[-1]["checkpoint"].partition(":")[2]
    assert (killed.run.directory / "checkpoints" / name / "manifest.json").exists()
    assert killed.end(0)["end"] == STEPS


def test_no_rank_gathers_the_whole_state(whole: CompletedRun) -> None:
    sizes = [path.stat().st_size for path in whole.newest().glob("*.distcp")]
    assert len(sizes) == RANKS
    assert max(sizes) < 0.6 * sum(sizes)


def test_shards_of_two_ranks_load_into_one_process(whole: CompletedRun) -> None:
    saved = torch.load(whole.run.directory.parent / "whole.pt")
    model, ema = (
        {key: torch.full_like(value, 7) for key, value in saved[part].items()}
        for part in ("model", "ema")
    )
    state = {"model": model, "extra": {f"ema.{key}": value for key, value in ema.items()}}
    load_state(whole.newest(), state, group=None, strict=False)
    for part, loaded in (("model", model), ("ema", ema)):
        assert all(torch.equal(loaded[key], saved[part][key]) for key in saved[part])


def test_stock_dcp_reads_the_checkpoint(whole: CompletedRun, tmp_path: Path) -> None:
    saved = torch.load(whole.run.directory.parent / "whole.pt")["model"]
    model = exact_program.Net()
    wanted = {"model": model.state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load_with_dcp(wanted, checkpoint_id=whole.newest())
    set_model_state_dict(model, wanted["model"])
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
    dcp_to_torch_save(whole.newest(), tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)["model"]
    assert set(one) == set(saved)
    assert all(torch.equal(one[key], saved[key]) for key in saved)


def test_epoch_and_step_do_not_restart(whole: CompletedRun, killed: CompletedRun) -> None:
    done = [line["step"] for line in killed.lines(0) if "step" in line]
    resumed = killed.resumes()[-1]["step"]
    again = len(done) - 1 - done[::-1].index(resumed + 1)
    assert done[again:] == list(range(resumed + 1, STEPS + 1))
    assert killed.column("epoch") == whole.column("epoch")
    # It was killed within an epoch, not at its end.
    assert killed.column("epoch")[resumed] == killed.column("epoch")[resumed - 1] >= 1


def test_data_is_neither_repeated_nor_reshuffled(whole: CompletedRun, killed: CompletedRun) -> None:
    for rank in range(RANKS):
        assert killed.column("ids", rank) == whole.column("ids", rank)
    pairs = zip(killed.column("ids", 0), killed.column("ids", 1), strict=True)
    order = [sample for ids in pairs for share in ids for sample in share]
    assert len(order) == STEPS * GLOBAL_BATCH
    epochs = [order[at : at + SAMPLES] for at in range(0, len(order) - SAMPLES, SAMPLES)]
    assert len(epochs) == 2
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_learning_rate_schedule_continues(whole: CompletedRun, killed: CompletedRun) -> None:
    rates = killed.column("lr")
    assert rates == whole.column("lr")
    assert rates[: SWA_START + 1] == sorted(rates[: SWA_START + 1], reverse=True)
    assert len(set(rates)) > SWA_START


def test_gradient_scaler_continues(whole: CompletedRun, killed: CompletedRun) -> None:
    scales = killed.column("scale")
    assert scales == whole.column("scale")
    assert scales[OVERFLOW_STEP] == scales[OVERFLOW_STEP - 1] / 2
    assert max(scales) > scales[0]
    assert killed.end(0)["scaler"] == whole.end(0)["scaler"]


def test_averaged_weights_are_restored(whole: CompletedRun, killed: CompletedRun) -> None:
    for name in ("ema", "swa"):
        assert killed.end(1)[name] == whole.end(1)[name]
        assert killed.end(1)[name] != killed.end(1)["model"]


def test_keeping_the_best_checkpoint_also_keeps_the_newest(
    whole: CompletedRun, killed: CompletedRun
) -> None:
    assert killed.end(0)["best"] == whole.end(0)["best"]
    manifests = [read_manifest(path) for path in whole.run.list_checkpoints()]
    branch = [manifest for manifest in manifests if isinstance(manifest, Manifest)]
    keep = Keep.model_validate({"last": 1, "best": {"metric": "loss", "mode": "min", "n": 1}})
    kept = set(kept_by_rules(branch, keep, now=time.time()))
    best = min(branch, key=lambda manifest: manifest.metrics["loss"])
    assert kept == {branch[-1].name, best.name}


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [2, 5])
def test_several_resumes_in_a_row_are_bit_identical(
    resumes: int, whole: CompletedRun, tmp_path: Path
) -> None:
    lot = random.Random(resumes)
    kills = sorted(lot.sample(range(2, STEPS), resumes))
    ran = train(tmp_path / "run", kills)
    assert_identical(ran, whole)
    assert len(ran.resumes()) == resumes + 1
