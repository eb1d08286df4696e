"""Imports: every form comes back equal to the bit, and training starts from it, once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.frameworks import imported_program, pretrained_program
from tests.frameworks.pretrained_program import LAYOUTS, READ_ONCE, SOURCES, make_model
from tests.process.local_command import Local
from tests.support.forked_ranks import run_ranks
from tests.support.rank_programs import run_program
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import IMPORTED, RunPaths
from holdfast.contracts.errors import CheckpointError, RunConflictError, SpecError
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import RunState
from holdfast.flows.forks import fork_run
from holdfast.flows.imports import import_run
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.trainer import load_checkpoint, load_pretrained
from holdfast.trainer.export.__main__ import main as export
from holdfast.trainer.importing import main as import_into
from holdfast.workers.runs import operator

UID: Final = "0" * 32
RANKS_S: Final = 120.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of one model in every form."""
    folder = tmp_path_factory.mktemp("sources")
    model = make_model(1)
    state = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    (folder / "safetensors").mkdir()
    save_file(state, folder / "safetensors" / "model.safetensors")
    turned = {**model.state_dict(), "up.weight": model.up.weight.detach().t().contiguous().t()}
    torch.save({"model": turned, "step": 3}, folder / "torch.pt")
    save_with_dcp(
        {"model": model.state_dict(), "step": 3}, checkpoint_id=folder / "dcp", no_dist=True
    )
    return folder


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    made.end_all()


def imported(source: Path, run: Path, *arguments: str) -> Path:
    """Import into a new run folder, and return the checkpoint."""
    assert import_into([str(source), "--run", str(run), "--uid", UID, *arguments]) == 0
    checkpoint = RunPaths(run).checkpoint(IMPORTED)
    assert read_manifest(checkpoint) is not None
    return checkpoint


def exported(checkpoint: Path, form: str, output: Path) -> Path:
    assert export([str(checkpoint), "--to", form, "--output", str(output)]) == 0
    return output


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_a_transformers_model_comes_back_through_its_own_loader(tmp_path: Path) -> None:
    from transformers import AutoModel, GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=97)
    model = GPT2Model(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    checkpoint = imported(tmp_path / "saved", tmp_path / "run")
    whole = exported(checkpoint, "safetensors", tmp_path / "whole.safetensors")
    assert_equal(load_file(whole), dict(model.state_dict()))
    folder = exported(checkpoint, "hf", tmp_path / "hf")
    shutil.copy(tmp_path / "saved" / "config.json", folder)
    again = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))
    fresh = GPT2Model(config)
    load_pretrained(fresh, tmp_path / "saved")
    assert_equal(dict(fresh.to(torch.bfloat16).state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("form", SOURCES)
def test_every_form_comes_back_equal_to_the_bit(sources: Path, tmp_path: Path, form: str) -> None:
    expected = dict(make_model(1).state_dict())
    if form == "safetensors":
        del expected["head.weight"]
    checkpoint = imported(sources / form, tmp_path / "run")
    found = torch.load(exported(checkpoint, "torch", tmp_path / "x.pt"), weights_only=True)
    assert_equal(found["model"], expected)
    blank = {name: torch.zeros_like(value) for name, value in expected.items()}
    load_with_dcp({"model": blank}, checkpoint_id=checkpoint, no_dist=True)
    assert_equal(blank, expected)
    model = make_model(2)
    load_checkpoint(checkpoint, model)
    assert_equal(dict(model.state_dict()), dict(make_model(1).state_dict()))
    facts = json.loads((checkpoint / "train_state.json").read_text())["imported"]
    assert (facts["path"], facts["format"]) == (str(sources / form), form.removesuffix(".pt"))
    assert facts["tensors"] == len(expected)


def test_equal_weights_have_one_digest_whatever_their_form(sources: Path, tmp_path: Path) -> None:
    digests = [
        json.loads((imported(sources / form, tmp_path / form) / "train_state.json").read_text())[
            "imported"
        ]["digest"]
        for form in ("torch.pt", "dcp")
    ]
    assert digests[0] == digests[1]


@pytest.mark.more
def test_weights_are_loaded_on_any_sharding_and_each_byte_is_read_once(sources: Path) -> None:
    said = run_program(
        pretrained_program.__name__.removeprefix("tests."), sources, timeout_s=RANKS_S
    )
    loads = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert {(one["source"], one["layout"]) for one in loads} == {
        (source, layout) for source in SOURCES for layout in LAYOUTS
    }
    for one in loads:
        # The entries of DCP have headers, and a tensor in another order has runs between others'.
        if one["source"] == "safetensors":
            assert one["ratio"] <= READ_ONCE, one


@pytest.mark.slow
def test_training_starts_from_an_import_once_and_goes_on_after_a_kill(
    local: Local, tmp_path: Path
) -> None:
    state = imported_program.make_model(1).state_dict()
    weights = tmp_path / "weights.safetensors"
    save_file({f"old.{k}": v for k, v in state.items() if k != "head.weight"}, weights)
    plain = tmp_path / "plain.safetensors"
    save_file({k: v for k, v in state.items() if k != "head.weight"}, plain)
    told = local.json("import", str(weights), "--name", "base", "--rename", "old.*=*")
    assert (told["tensors"], told["format"]) == (3, "safetensors")
    command = [Path(imported_program.__file__).name, json.dumps({"steps": 7, "kill": 5})]
    spec = local.write_spec(
        "tuned",
        {},
        command=command,
        launch={"working_directory": str(Path(imported_program.__file__).parent)},
        resources={"gpus_per_node": 2},
        checkpoint={"interval": 2},
    )
    ended = local.json("fork", told["checkpoint"], "--spec", str(spec), "--wait")
    assert (ended["run"], ended["state"], ended["step"]) == ("tuned", "completed", 7)
    tuned = RunPaths(local.root / "tuned")
    assert (tuned.directory / "killed").exists()
    settings = {"steps": 7, "pretrained": str(plain)}
    act = partial(imported_program.train, settings, tmp_path / "alone")
    run_ranks(2, tmp_path / "store", act)
    assert losses_of(tuned.directory) == losses_of(tmp_path / "alone")
    shown = local.json("show", "tuned")
    assert shown["forked_from"] == told["checkpoint"]
    edges = local.json("lineage", "base")["edges"]
    source = {"from": told["checkpoint"], "to": str(weights), "kind": "imported_from"}
    assert source in edges
    assert load_history(tuned).record.forked_from == told["checkpoint"]


def losses_of(run: Path) -> dict[str, str]:
    """The last loss of each step: the steps after the newest checkpoint ran twice."""
    return dict(line.split() for line in (run / "losses.txt").read_text().splitlines())


@pytest.mark.more
def test_a_failed_import_leaves_no_run_and_a_killed_one_can_be_repeated(
    sources: Path, tmp_path: Path
) -> None:
    begin = partial(import_run, root=tmp_path, by="me")
    (tmp_path / "bad.safetensors").write_bytes(b"\1")
    with pytest.raises(CheckpointError, match="the file has 1"):
        begin(tmp_path / "bad.safetensors", "base")
    assert not (tmp_path / "base").exists()
    with pytest.raises(SpecError, match="--rename x: expected OLD=NEW"):
        begin(sources, "base", rename=["x"])
    # What a killed import leaves: a folder that is no run yet, with a part of the checkpoint.
    left = RunPaths(tmp_path / "base")
    left.checkpoint(IMPORTED).mkdir(parents=True)
    (left.checkpoint(IMPORTED) / "__0_0.distcp").write_bytes(b"part")
    with FlowLock(left.flow_lock) as lock:
        assert lock.try_take()
        with pytest.raises(RunConflictError, match="exists already"):
            begin(sources / "safetensors", "base")
    told = begin(sources / "safetensors", "base", exclude=["up"])
    manifest = read_manifest(left.checkpoint(IMPORTED))
    assert manifest is not None
    assert (manifest.id, manifest.reason) == (told["checkpoint"], "import")
    assert find_damage(left.checkpoint(IMPORTED), manifest) == []
    with pytest.raises(RunConflictError, match="choose another --name"):
        begin(sources / "torch.pt", "base")


@pytest.mark.more
def test_an_imported_run_is_complete_and_starts_only_with_a_spec(
    sources: Path, tmp_path: Path
) -> None:
    import_run(sources / "dcp", "base", root=tmp_path, by="me")
    run = RunPaths(tmp_path / "base")
    assert load_history(run).state is RunState.COMPLETED
    with pytest.raises(SpecError, match="holdfast fork"):
        operator.request(run, "relaunch", by="me")
    with pytest.raises(SpecError, match="has no program"):
        fork_run(run, str(IMPORTED), name="next", overrides=(), by="me")


def deepspeed_case(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    """Save a ZeRO checkpoint with two ranks, and return what DeepSpeed's own tool reads."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
            *("-m", "tests.frameworks.zero_program", str(folder), str(stage)),
        ],
        capture_output=True,
        text=True,
        timeout=RANKS_S,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(folder / "expected.pt", weights_only=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_zero_checkpoint_equals_what_deepspeed_reads(tmp_path: Path, stage: int) -> None:
    expected = deepspeed_case(tmp_path, stage)
    checkpoint = imported(tmp_path / "saved", tmp_path / "run", "--form", "deepspeed")
    found = torch.load(exported(checkpoint, "torch", tmp_path / "x.pt"), weights_only=True)
    assert_equal(found["model"], expected)
