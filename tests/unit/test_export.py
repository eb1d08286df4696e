"""Exports: what each format contains, which keys are selected, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.trainer.export.__main__ import main
from holdfast.trainer.export.forms import ExportEntry, batches


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    embedding = torch.randn(50, 8)
    return {
        "model": {
            "embed.weight": embedding,
            "head.weight": embedding.clone(),
            "half": torch.randn(6, 5).to(torch.bfloat16),
            "count": torch.tensor(7),
        },
        "optimizer": {
            "state": {"embed.weight": {"exp_avg": torch.randn(50, 8), "step": torch.tensor(3.0)}},
            "param_groups": {"embed.weight": {"lr": 0.01, "betas": (0.9, 0.95)}},
        },
    }


@pytest.fixture(scope="module")
def saved(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stock") / "saved"
    save_with_dcp(state, checkpoint_id=directory, no_dist=True)
    return directory


def export(saved: Path, form: str, output: Path, *arguments: str) -> None:
    assert main([str(saved), "--to", form, "--output", str(output), *arguments]) == 0


def test_torch_export_has_the_whole_nested_state(
    saved: Path, state: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(saved, "torch", tmp_path / "deep" / "all.pt", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["bytes"] == (tmp_path / "deep" / "all.pt").stat().st_size
    assert (facts["format"], facts["tensors"]) == ("torch", 6)
    found = torch.load(tmp_path / "deep" / "all.pt", weights_only=True)
    assert found["model"].keys() == state["model"].keys()
    assert all(torch.equal(found["model"][key], value) for key, value in state["model"].items())
    (group,) = found["optimizer"]["param_groups"]
    assert (group["lr"], tuple(group["betas"])) == (0.01, (0.9, 0.95))
    assert (group["params"], group["param_names"]) == ([0], ["embed.weight"])
    moment = state["optimizer"]["state"]["embed.weight"]["exp_avg"]
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], moment)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["all.pt"]


def test_safetensors_export_finds_the_weights_below_another_key(
    state: dict[str, Any], tmp_path: Path
) -> None:
    save_with_dcp({"app": state, "step": 7}, checkpoint_id=tmp_path / "d", no_dist=True)
    export(tmp_path / "d", "safetensors", tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors").keys() == state["model"].keys()


def test_safetensors_export_has_the_weights_under_their_own_names(
    saved: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    place = tmp_path / "weights.safetensors"
    export(saved, "safetensors", place, "--dtype", "float16", "--rename", "model.head.*=model.lm.*")
    found = load_file(place)
    assert found.keys() == {"embed.weight", "lm.weight", "half", "count"}
    assert torch.equal(found["lm.weight"], state["model"]["head.weight"].half())
    assert torch.equal(found["half"], state["model"]["half"].half())
    assert found["count"].dtype == torch.int64
    with safe_open(place, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_flat_state_dict_keeps_its_names(tmp_path: Path) -> None:
    flat = {"model.x": torch.zeros(2), "x": torch.ones(2)}
    save_with_dcp(flat, checkpoint_id=tmp_path / "d", no_dist=True)
    export(tmp_path / "d", "safetensors", tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == flat.keys()
    assert all(torch.equal(found[key], value) for key, value in flat.items())


def test_two_tensors_never_get_one_name(
    state: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"model": state["model"], "embed.weight": torch.ones(2)}
    save_with_dcp(both, checkpoint_id=tmp_path / "d", no_dist=True)
    arguments = ["--to", "safetensors", "--output", str(tmp_path / "w")]
    arguments += ["--include", "model", "--include", "embed.weight"]
    assert main([str(tmp_path / "d"), *arguments]) == 1
    assert "model.embed.weight and embed.weight would both be embed.weight" in (
        capsys.readouterr().err
    )


def test_groups_that_differ_in_a_tensor_stay_apart(tmp_path: Path) -> None:
    rates = {name: {"lr": torch.tensor(lr)} for name, lr in (("a", 0.1), ("b", 0.1 + 1e-6))}
    save_with_dcp(
        {"optimizer": {"param_groups": rates}}, checkpoint_id=tmp_path / "d", no_dist=True
    )
    export(tmp_path / "d", "torch", tmp_path / "all.pt")
    groups = torch.load(tmp_path / "all.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [one["param_names"] for one in groups] == [["a"], ["b"]]


def test_hf_export_is_split_into_shards_with_an_index(
    saved: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    export(saved, "hf", tmp_path / "hf", "--shard-bytes", "1700")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    where = index["weight_map"]
    assert index["metadata"]["total_size"] == 2 * 50 * 8 * 4 + 6 * 5 * 2 + 8
    assert set(where.values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    for key, value in state["model"].items():
        assert torch.equal(load_file(tmp_path / "hf" / where[key])[key], value)
    export(saved, "hf", tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("narrowed", [False, True])
def test_dcp_export_is_readable_by_stock_dcp(
    saved: Path, state: dict[str, Any], tmp_path: Path, narrowed: bool
) -> None:
    export(saved, "dcp", tmp_path / "dcp", *(("--include", "model") if narrowed else ()))
    found = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
    load_with_dcp(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(found["model"][key], value) for key, value in state["model"].items())
    copied = (tmp_path / "dcp" / "__0_0.distcp").read_bytes()
    assert (copied == (saved / "__0_0.distcp").read_bytes()) is not narrowed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "torch", "--include", "mdoel"), "no key matches mdoel; it has model.embed"),
        (("--to", "safetensors", "--include", "optimizer"), "cannot hold numbers, and optimizer."),
        (("--to", "hf", "--rename", "model.nothing=model.x"), "model.nothing"),
    ],
)
def test_a_failed_export_leaves_no_files(
    saved: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(saved), "--output", str(tmp_path / "out"), *arguments]) == 1
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_file_is_not_overwritten(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.pt"
    mine.write_text("precious")
    assert main([str(saved), "--to", "torch", "--output", str(mine)]) == 1
    assert "exists already and is not overwritten" in capsys.readouterr().err
    assert mine.read_text() == "precious"
    assert main([str(tmp_path), "--to", "torch", "--output", str(tmp_path / "x")]) == 1
    assert "holdfast: " in capsys.readouterr().err


def test_a_batch_is_as_large_as_allowed_and_never_empty() -> None:
    entries = [
        ExportEntry(str(size), str(size), (), torch.uint8, (), size) for size in (5, 3, 9, 1)
    ]
    found = [[one.bytes for one in batch] for batch in batches(entries, 8)]
    assert found == [[5, 3], [9], [1]]
