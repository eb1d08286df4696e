"""Loading in one process: keys, stages, entries of other writers, planners and damaged bytes."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.contracts.disk.digests import BLOCK_BYTES, FileChecksum, digest_of
from holdfast.contracts.disk.durable import to_json
from holdfast.contracts.disk.leases import readers
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import (
    CheckpointError,
    DamagedCheckpointError,
    KeyMismatchError,
    NotFoundError,
)
from holdfast.trainer import load_checkpoint, load_pretrained
from holdfast.trainer.format.metadata import open_checkpoint
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.planning.compare_keys import Selection

NAME = "step-00000003.a0001.l01"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def commit(directory: Path, *, blocks: bool = True) -> None:
    """Write the manifest of the existing files; without `blocks`, in the older form."""
    entries = []
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        content, name = path.read_bytes(), path.relative_to(directory).as_posix()
        running = FileChecksum(len(content))
        running.update(content)
        older = FileEntry(path=name, bytes=len(content), checksum=digest_of(content))
        entries.append(FileEntry.of(name, len(content), running) if blocks else older)
    manifest = Manifest(
        run_uid="0" * 32,
        run="r",
        name=NAME,
        step=3,
        attempt=1,
        launch=1,
        world_size=1,
        files=tuple(entries),
        committed_at=1.0,
    )
    (directory / MANIFEST).write_bytes(to_json(manifest.model_dump(mode="json")))


def make_state(fill: float | None = None) -> dict[str, Any]:
    """A tensor of more than two blocks, one stored by columns, one empty, one scalar."""
    torch.manual_seed(1)
    tensors = {
        "wide": torch.randn(1024, 2500),
        "turned": torch.randn(30, 40).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }
    if fill is not None:
        tensors = {key: torch.full(t.shape, fill, dtype=t.dtype) for key, t in tensors.items()}
    groups = {"lr": 0.5, "betas": [0.9, 0.99]} if fill is None else {"lr": 0, "betas": 0}
    return {"model": tensors, "optimizer": groups}


def assert_loaded(state: dict[str, Any]) -> None:
    expected = make_state()
    for key, value in expected["model"].items():
        assert torch.equal(state["model"][key], value.to(state["model"][key].dtype)), key
    assert state["optimizer"] == expected["optimizer"]


def saved(tmp_path: Path) -> Path:
    directory = tmp_path / NAME
    save_with_dcp(make_state(), checkpoint_id=directory)
    return directory


@pytest.mark.parametrize("blocks", [None, True, False])
def test_entries_of_any_form_are_loaded(tmp_path: Path, blocks: bool | None) -> None:
    directory = saved(tmp_path)
    if blocks is not None:
        commit(directory, blocks=blocks)
    state = make_state(7.0)
    report = load_state(directory, state, group=None)
    assert_loaded(state)
    assert report.restored == 6
    assert report.bytes_unique <= report.bytes_read


@pytest.mark.parametrize("blocks", [True, False])
def test_a_flipped_bit_is_detected_with_and_without_block_digests(
    tmp_path: Path, blocks: bool
) -> None:
    directory = saved(tmp_path)
    commit(directory, blocks=blocks)
    content = bytearray((directory / "__0_0.distcp").read_bytes())
    content[BLOCK_BYTES + 5] ^= 1
    (directory / "__0_0.distcp").write_bytes(content)
    with pytest.raises(DamagedCheckpointError) as damaged:
        load_state(directory, make_state(7.0), group=None)
    (line,) = damaged.value.damaged
    where = "bytes 4194304 to 8388607: checksum " if blocks else "checksum "
    assert line.startswith(f"__0_0.distcp: {where}")


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_missing_or_truncated_file_is_reported_as_damage(
    tmp_path: Path, with_manifest: bool
) -> None:
    directory = saved(tmp_path)
    if with_manifest:
        commit(directory)
    path = directory / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DamagedCheckpointError, match=r"not in the file|bytes, expected"):
        load_state(directory, make_state(7.0), group=None)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"No such file|does not have"):
        load_state(directory, make_state(7.0), group=None)


def test_an_entry_in_an_unknown_zip_layout_is_read_by_torch(tmp_path: Path) -> None:
    """A zip as another torch version might write it: other records, the same tensor."""
    directory = saved(tmp_path)
    path = directory / "__0_0.distcp"
    whole = path.read_bytes()
    state = make_state(7.0)
    # Change the name of the storage alignment record in the header of the scalar's zip.
    assert whole.count(b".storage_alignment") >= 8
    at = whole.index(b"archive/.storage_alignment")
    path.write_bytes(whole[: at + 9] + b"storage_alignmenX" + whole[at + 26 :])
    load_state(directory, state, group=None)
    assert_loaded(state)


def test_a_custom_planner_loads_through_stock_dcp(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    commit(directory)
    planner, state = DefaultLoadPlanner(), make_state(7.0)
    report = load_state(directory, state, group=None, planner=planner)
    assert_loaded(state)
    # Only what the planner reads is counted, and it reads nothing of the empty tensor.
    assert (report.restored, report.bytes_read) == (5, 0)
    with pytest.raises(CheckpointError, match="a planner and a selection of keys"):
        load_state(directory, state, group=None, planner=planner, exclude=["model"])
    with open(directory / "__0_0.distcp", "r+b") as stream:
        stream.seek(-9, os.SEEK_END)
        stream.write(b"?")
    with pytest.raises(DamagedCheckpointError, match="checksum"):
        load_state(directory, state, group=None, planner=DefaultLoadPlanner())


def test_the_stages_of_a_pipeline_load_as_one_checkpoint(tmp_path: Path) -> None:
    """Each stage wrote its own folder; a tied tensor is in both."""
    directory, whole = tmp_path / NAME, make_state()
    stages = [("wide", "scalar"), ("turned", "empty", "scalar")]
    for stage, keys in enumerate(stages):
        part = {"model": {key: whole["model"][key] for key in keys}}
        if stage == 1:
            part["optimizer"] = whole["optimizer"]
        save_with_dcp(part, checkpoint_id=directory / f"pp{stage}")
    for has_manifest in (False, True):
        if has_manifest:
            commit(directory)
        state = make_state(7.0)
        report = load_state(directory, state, group=None)
        assert_loaded(state)
        assert (report.missing, report.extra) == ((), ())
    one_stage = {"model": {"wide": torch.zeros(1024, 2500)}}
    load_state(directory, one_stage, group=None, include=["model.wide"])
    assert torch.equal(one_stage["model"]["wide"], whole["model"]["wide"])


def test_metadata_with_ranges_outside_its_files_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    commit(directory)
    metadata = open_checkpoint(directory).metadata
    index, info = next(iter(metadata.storage_data.items()))
    for change, words in (
        ({"relative_path": "other"}, "a file that the checkpoint does not have"),
        ({"offset": 1 << 40}, "bytes that are not in the file"),
        ({"offset": -4096}, "expected some within the file"),
        ({"length": -1}, "expected some within the file"),
    ):
        metadata.storage_data[index] = replace(info, **change)
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
        (directory / MANIFEST).unlink()
        commit(directory)
        with pytest.raises(DamagedCheckpointError, match=words):
            load_state(directory, make_state(7.0), group=None)


def test_chunks_that_do_not_cover_a_tensor_are_reported_as_damage(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    metadata = open_checkpoint(directory).metadata
    entry = metadata.state_dict_metadata["model.wide"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks = []
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match="0 of the 2560000 elements"):
        load_state(directory, make_state(7.0), group=None)


def test_a_tensor_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    state = make_state(7.0)
    state["model"]["wide"] = torch.empty(1024, 2500, device="meta")
    with pytest.raises(CheckpointError, match=r"model\.wide: it is on the meta device"):
        load_state(saved(tmp_path), state, group=None)


SAVED = ("model.a.w", "model.a.b", "model.ab.w", "optimizer.state.a.w.step", "rng.rank00000.cpu")


@pytest.mark.parametrize(
    ("rename", "changed"),
    [
        ({}, {}),
        ({"model.a.w": "model.c"}, {0: "model.c", 3: "optimizer.state.c.step"}),
        (
            {"model.a.*": "model.z.y.*"},
            {0: "model.z.y.w", 1: "model.z.y.b", 3: "optimizer.state.z.y.w.step"},
        ),
        ({"model.*": "net.*"}, {0: "net.a.w", 1: "net.a.b", 2: "net.ab.w"}),
        ({"rng.rank00000.cpu": "other"}, {4: "other"}),
    ],
)
def test_saved_keys_are_renamed(rename: dict[str, str], changed: dict[int, str]) -> None:
    expected = {key: changed.get(index, key) for index, key in enumerate(SAVED)}
    assert Selection(rename=rename).rename_all(SAVED) == expected


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"model.nothing": "model.x"}, "model.nothing: no saved key has this name"),
        ({"model.a.w": "model.a.b"}, "would both be model.a.b"),
        ({"model.a.*": "model.x"}, r"only one of them ends with \.\*"),
    ],
)
def test_an_impossible_rename_is_refused(rename: dict[str, str], words: str) -> None:
    with pytest.raises(KeyMismatchError, match=words):
        Selection(rename=rename).rename_all(SAVED)


@pytest.mark.parametrize(
    ("include", "exclude", "taken"),
    [
        ((), (), {0, 1, 2, 3, 4}),
        ((), ("model.a",), {2, 4}),
        ((), ("optimizer", "rng"), {0, 1, 2}),
        (("model",), (), {0, 1, 2}),
        (("model",), ("model.a.w",), {1, 2}),
    ],
)
def test_keys_that_are_included_and_not_excluded_are_selected(
    include: tuple[str, ...], exclude: tuple[str, ...], taken: set[int]
) -> None:
    pick = Selection(include, exclude)
    assert {index for index, key in enumerate(SAVED) if pick.takes(key)} == taken


@pytest.mark.parametrize(("name", "is_held"), [(NAME, True), ("of-our-own", False)])
def test_a_checkpoint_of_a_run_has_a_lease_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_held: bool
) -> None:
    directory = tmp_path / "r" / "checkpoints" / name
    model = torch.nn.Linear(6, 4)
    save_with_dcp({"model": get_model_state_dict(model)}, checkpoint_id=directory)
    held: list[bool] = []
    read = os.preadv

    def watched(handle: int, buffers: Any, offset: int) -> int:
        held.append(bool(readers(directory)))
        return read(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    load_checkpoint(directory, model)
    assert set(held) == {is_held}
    assert not readers(directory)
    assert [path.name for path in directory.parent.iterdir()] == [name]


def test_an_uncommitted_checkpoint_of_a_run_is_not_loaded_as_stock_dcp(tmp_path: Path) -> None:
    directory = tmp_path / "r" / "checkpoints" / NAME
    model = torch.nn.Linear(6, 4)
    save_with_dcp({"model": get_model_state_dict(model)}, checkpoint_id=directory)
    RunPaths(tmp_path / "r").spec.write_text("{}")
    with pytest.raises(NotFoundError, match="never committed or is being deleted"):
        load_checkpoint(directory, model)
    assert not readers(directory)
    commit(directory)
    assert load_checkpoint(directory, model).restored == 2


def test_load_checkpoint_loads_a_stock_dcp_model_by_path_and_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock DCP wrote the model and its optimizer."""
    torch.manual_seed(0)
    trained = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.5)
    trained(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    directory = tmp_path / "r" / "checkpoints" / NAME
    state = {
        "model": get_model_state_dict(trained),
        "optimizer": get_optimizer_state_dict(trained, optimizer, options=options),
        "scheduler": {"last_epoch": 3},
    }
    save_with_dcp(state, checkpoint_id=directory)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    other = torch.optim.AdamW(model.parameters())
    report = load_checkpoint(directory, model, other)
    assert (report.missing, report.extra, report.excluded) == ((), (), ("scheduler.last_epoch",))
    for mine, theirs in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(other.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert other.param_groups[0]["lr"] == 0.5
    monkeypatch.setenv("HOLDFAST_ROOT", str(tmp_path))
    head = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 9))
    before = head.state_dict()["1.weight"].clone()
    report = load_checkpoint(f"r:{NAME}", head, exclude=["model.1"])
    assert torch.equal(head.state_dict()["0.weight"], trained.state_dict()["0.weight"])
    assert torch.equal(head.state_dict()["1.weight"], before)
    with pytest.raises(KeyMismatchError, match=r"model\.1\.weight: wanted \(9, 4\)"):
        load_checkpoint(directory, head)
    with pytest.raises(NotFoundError, match="no such checkpoint"):
        load_checkpoint("r:step-00000009.a0001.l01", model)


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        (make_state(0.0), None, "model is an object of type dict"),
        ([torch.nn.Linear(2, 2), {}], None, "model is a list that contains dict"),
        (torch.nn.Linear(2, 2), {"state": {}}, "optimizer is an object of type dict"),
    ],
)
def test_a_target_of_another_type_is_refused_with_the_function_to_use(
    tmp_path: Path, model: Any, optimizer: Any, words: str
) -> None:
    with pytest.raises(TypeError, match=words) as refused:
        load_checkpoint(saved(tmp_path), model, optimizer)
    assert "reader.load_state(Path(directory), state, group=None)" in str(refused.value)


def test_names_to_include_and_exclude_are_names(tmp_path: Path) -> None:
    """One text is one name, and a name that fits no key is refused before anything is loaded."""
    torch.manual_seed(0)
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    save_with_dcp({"model": saved.state_dict()}, checkpoint_id=str(tmp_path))

    def loaded(**selection: Any) -> list[str]:
        """The parameters that a load changes."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        load_checkpoint(tmp_path, model, **selection)
        now = model.state_dict()
        return [name for name, value in before.items() if not torch.equal(value, now[name])]

    every = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert loaded(include="model.0") == loaded(exclude="model.1") == every[:2]
    assert loaded(include=["model.0", "model.1.bias"]) == [*every[:2], "1.bias"]
    # A program may leave out the optimizer of any checkpoint.
    assert loaded(exclude="optimizer") == loaded(include=["model", "optimizer"]) == every
    near: dict[str, Any] = {"include": "model.O", "exclude": ["model.1.wieght"]}
    for title, names in near.items():
        with pytest.raises(KeyMismatchError, match=rf"{title} 'model.*no key.*did you mean model"):
            loaded(**{title: names}, strict=False)
    with pytest.raises(KeyMismatchError, match=r"did you mean model\.1 or"):
        loaded(exclude="model.1.*")
    with pytest.raises(KeyMismatchError, match=r"did you mean model\.0\.weight"):
        loaded(rename={"model.0.wait": "model.0.weight"})
    for title, value in {
        "include": 3, "exclude": [1], "rename": {1: 2}, "strict": None,
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=title):
            loaded(**{title: value})
    with pytest.raises(TypeError, match="exclude=None"):
        load_pretrained(saved, tmp_path, exclude=None)  # type: ignore[arg-type]
    with pytest.raises(KeyMismatchError, match=r"did you mean model\.1"):
        load_pretrained(saved, tmp_path, exclude="11")
