"""Sources of weights: what is read from each form, and which files are refused, with the reason."""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.other_users import STRANGER
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from holdfast.contracts.disk.paths import IMPORTED, RunPaths
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError, KeyMismatchError
from holdfast.trainer.export.forms import appearing
from holdfast.trainer.importing import import_into
from holdfast.trainer.sources.find import open_source
from holdfast.trainer.sources.safetensors_file import TYPES, parse_header
from holdfast.trainer.sources.tensors import rights_of, select

F4 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def state() -> dict[str, torch.Tensor]:
    """Tensors of many types and shapes, also empty, without dimensions, and in another order."""
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(11, 7),
        "half": torch.randn(3).bfloat16(),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
        "turned": torch.randn(4, 6).t(),
        "small": torch.randn(5, 5).to(torch.float8_e4m3fn),
    }


def write_raw(path: Path, header: Any, data: bytes = bytes(8), length: int | None = None) -> Path:
    """Write a safetensors file with any header: a table, or raw bytes."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(content) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + content + data)
    return path


def content_of(folder: Path, part: Any) -> bytes:
    """The bytes that a part's segments name, one after another."""
    found = b""
    for segment in part.segments:
        with open(folder / segment.path, "rb") as stream:
            stream.seek(segment.offset)
            found += stream.read(segment.bytes)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def save_safetensors(folder: Path) -> Path:
    save_file({k: v.contiguous() for k, v in state().items()}, folder / "model.safetensors")
    return folder


def save_torch(folder: Path) -> Path:
    torch.save({"state_dict": state(), "step": 3, "optimizer": {"lr": 0.1}}, folder / "last.pt")
    return folder / "last.pt"


def save_dcp(folder: Path) -> Path:
    save_with_dcp({"model": state(), "step": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.parametrize("save", [save_safetensors, save_torch, save_dcp])
def test_every_form_tells_types_shapes_and_bytes(
    tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    source = open_source(save(tmp_path))
    parts = {part.name: part for part in source.parts}
    assert parts.keys() == state().keys()
    for name, tensor in state().items():
        part = parts[name]
        assert (part.dtype, part.shape) == (tensor.dtype, tuple(tensor.shape))
        stored = tensor if part.strides is None else tensor.t()
        assert content_of(source.base, part) == raw(stored)
    assert parts["turned"].strides in (None, (1, 6))


def test_every_type_of_the_format_is_known_to_the_library(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(2, dtype=dtype) for name, dtype in TYPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = {part.name: part.dtype for part in open_source(tmp_path).parts}
    assert found == TYPES


def test_a_folder_of_shards_is_read_by_its_index(tmp_path: Path) -> None:
    where = {}
    for number, (name, tensor) in enumerate(state().items()):
        where[name] = f"model-{number % 2}.safetensors"
        shard = {n: t.contiguous() for n, t in state().items() if where.get(n) == where[name]}
        save_file(shard, tmp_path / where[name])
        assert tensor.dtype is shard[name].dtype
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert {part.name for part in open_source(tmp_path).parts} == state().keys()
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is missing"):
        open_source(tmp_path)


def test_a_snapshot_of_the_hub_has_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    (tmp_path / "models--x" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "models--x" / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    source = open_source(snapshot)
    assert content_of(source.base, source.parts[0]) == raw(torch.ones(2))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A snapshot in a cache of the Hugging Face hub that someone has made; returns the snapshot."""
    snapshot = tmp_path / "home" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "home" / "blobs").mkdir()
    save_file({"private": torch.ones(2)}, tmp_path / "home" / "private.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "home" / "blobs" / "0123")
    return snapshot


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "target",
    [
        "../../private.safetensors",
        "../other/x",
        "../../blobs/../private.safetensors",
        "../../blobs/deep/0123",
        "/etc/passwd",
    ],
)
def test_a_link_of_a_snapshot_that_does_not_end_in_blobs_is_refused(
    cache: Path, name: str, target: str
) -> None:
    """A forged cache would have the import read files beside it."""
    save_file({"a": torch.ones(2)}, cache / "model.safetensors")
    (cache / name).unlink(missing_ok=True)
    (cache / name).symlink_to(target)
    with pytest.raises(CheckpointError, match="a link that does not end in"):
        open_source(cache)


def test_a_link_in_blobs_is_not_followed(cache: Path) -> None:
    blobs = cache.parent.parent / "blobs"
    (blobs / "4567").symlink_to("../private.safetensors")
    (cache / "model.safetensors").symlink_to("../../blobs/4567")
    with pytest.raises(CheckpointError, match="a link"):
        open_source(cache)
    (cache / "model.safetensors").unlink()
    (cache / "model.safetensors").symlink_to("../../blobs/0123")
    assert [part.name for part in open_source(cache).parts] == ["a"]
    shutil.rmtree(blobs)
    blobs.symlink_to("/")
    with pytest.raises(CheckpointError, match="a link"):
        open_source(cache)


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644)])
def test_what_is_made_from_private_files_is_private(
    tmp_path: Path, mode: int, expected: int
) -> None:
    before = os.umask(0o022)
    try:
        (tmp_path / "in").mkdir()
        save_file({"a": torch.ones(2)}, tmp_path / "in" / "model.safetensors")
        (tmp_path / "in" / "model.safetensors").chmod(mode)
        run = RunPaths(tmp_path / "run")
        import_into(run, "a" * 32, open_source(tmp_path / "in"))
        directory = run.checkpoint(IMPORTED)
        modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
        assert modes.pop("manifest.json") == 0o644
        assert set(modes.values()) == {expected}
        with appearing(tmp_path / "out.pt", directory) as place:
            place.write_bytes(b"x")
        assert (tmp_path / "out.pt").stat().st_mode & 0o777 == expected
    finally:
        os.umask(before)


@pytest.mark.root
def test_files_of_another_group_are_not_shared_with_the_own_group(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch()
    path.chmod(0o660)
    assert rights_of(path.stat()) == 0o660
    os.chown(path, -1, STRANGER)
    assert rights_of(path.stat()) == 0o600


@pytest.mark.parametrize(
    "name", ["../../weights", "a/../b", "/a", "a//b", "", "\x1b]0;owned\x07", "a\nb", "\u202ex"]
)
def test_names_that_no_tensor_has_are_refused(tmp_path: Path, name: str) -> None:
    write_raw(tmp_path / "model.safetensors", {name: F4})
    with pytest.raises(CheckpointError, match="is not a name of a tensor") as caught:
        open_source(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.more
def test_a_file_with_very_many_empty_tensors_is_refused(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    many = {f"t{number}": empty for number in range(300_000)}
    write_raw(tmp_path / "model.safetensors", many, b"")
    began = time.thread_time()
    with pytest.raises(CheckpointError, match="300000 of its tensors have no elements"):
        open_source(tmp_path)
    assert time.thread_time() - began < 10


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        (b"", b"", 1 << 62, "header of 4611686018427387904 bytes"),
        (b"{", bytes(8), None, "not JSON"),
        (b"[" * 100_000, bytes(8), None, "not JSON"),
        (b"[]", bytes(8), None, "is a list"),
        (b'{"a":{},"a":{}}', bytes(8), None, "'a' twice"),
        ({"a": [1]}, bytes(8), None, "a: expected the facts"),
        ({"a": {**F4, "dtype": "F31"}}, bytes(8), None, "a: its type is F31"),
        ({"a": {**F4, "shape": [-2]}}, bytes(8), None, "a: its shape is"),
        ({"a": {**F4, "shape": [1 << 62, 2]}}, bytes(8), None, "larger than any tensor"),
        ({"a": {**F4, "shape": [True]}}, bytes(8), None, "a: its shape is"),
        ({"a": {**F4, "data_offsets": [8, 0]}}, bytes(8), None, "-8 bytes"),
        ({"a": {**F4, "data_offsets": [0, 9]}}, bytes(9), None, "9 bytes"),
        ({"a": F4, "b": {**F4, "data_offsets": [4, 12]}}, bytes(12), None, "b overlaps"),
        ({"a": F4, "b": {**F4, "data_offsets": [9, 17]}}, bytes(17), None, "b begins after a gap"),
        ({"a": F4}, bytes(7), None, "7 bytes of data"),
        ({"a": F4}, bytes(9), None, "9 bytes of data"),
    ],
)
def test_hostile_headers_are_refused_with_the_reason(
    tmp_path: Path, header: Any, data: bytes, length: int | None, words: str
) -> None:
    write_raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=words):
        open_source(tmp_path)


def test_a_file_cut_inside_its_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\1\0")
    with pytest.raises(CheckpointError, match="the file has 2"):
        open_source(tmp_path)


def test_a_header_is_parsed_without_its_file() -> None:
    content = json.dumps({"__metadata__": {"format": "pt"}, "b": F4}).encode()
    (part,) = parse_header(content, path="x", data_at=100, data_bytes=8, where="x")
    assert (part.name, part.dtype, part.shape, part.segments[0].offset) == (
        *("b", torch.float32, (2,)),
        100,
    )


def test_links_pipes_and_names_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "f"
    save_file({"a": torch.ones(2)}, outside)
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads outside its folder"):
        open_source(folder)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_source(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(CheckpointError, match="files in the same folder"):
        open_source(folder)
    index.write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(CheckpointError, match="weight_map"):
        open_source(folder)


def test_a_tensor_in_two_files_or_in_none_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="a: several of its files"):
        open_source(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "two.safetensors", "c": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"c: model\.safetensors\.index\.json names them"):
        open_source(tmp_path)


class Runs:
    """A value whose pickle calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HOLDFAST_TEST_TRAP"],)


def test_a_torch_file_with_code_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    monkeypatch.setenv("HOLDFAST_TEST_TRAP", str(trap))
    torch.save({"model": {"a": torch.ones(2)}, "args": Runs()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
        open_source(tmp_path)
    assert not trap.exists()


def test_odd_torch_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for value, words in (
        ([1, 2], "contains a list"),
        ({"optimizer": {"lr": 1}}, "a dict with optimizer"),
        ({"a": torch.ones(2), "n": 3}, "n: it is a int"),
        ({"a": torch.ones(2).to_sparse()}, "expected a state dict"),
        ({"model": {"a": torch.ones(2).to_sparse()}}, "a: it is a sparse or special tensor"),
        ({"a": torch.ones(1).expand(4, 1)}, "a: it is an expanded tensor"),
        ({3: torch.ones(2)}, "the key 3"),
    ):
        torch.save(value, path)
        with pytest.raises(CheckpointError, match=words):
            open_source(path)
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"since torch 1\.6"):
        open_source(path)
    torch.save({"a": torch.ones(200)}, path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match="not a zip"):
        open_source(path)


def test_a_compressed_or_repeated_record_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(200)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole:
        records = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in records.items():
            packed.writestr(name, content)
    with pytest.raises(CheckpointError, match="is compressed"):
        open_source(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as packed:
        for name, content in records.items():
            packed.writestr(name, content)
        with pytest.warns(UserWarning, match="Duplicate name"):
            packed.writestr(next(iter(records)), b"")
    with pytest.raises(CheckpointError, match="twice"):
        open_source(tmp_path / "y.pt")


def test_tensors_that_share_too_many_bytes_would_fill_the_disk(tmp_path: Path) -> None:
    base = torch.ones(100_000)
    torch.save({f"t{n}": base[: 99_000 + n] for n in range(3)}, tmp_path / "few.pt")
    assert len(open_source(tmp_path / "few.pt").parts) == 3
    torch.save({f"t{n}": base[: 99_000 + n] for n in range(30)}, tmp_path / "many.pt")
    with pytest.raises(CheckpointError, match="at most 8 times"):
        open_source(tmp_path / "many.pt")


def test_a_form_that_is_not_there_is_refused_with_what_is_there(tmp_path: Path) -> None:
    save_torch(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected \*\.safetensors files\. It has last\.pt"):
        open_source(tmp_path, "safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="It has no files"):
        open_source(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_source(tmp_path / "nothing")
    torch.save({}, tmp_path / "more.pt")
    with pytest.raises(CheckpointError, match=r"several torch files, last\.pt, more\.pt"):
        open_source(tmp_path)


def test_a_dcp_directory_without_one_of_its_files_is_refused(tmp_path: Path) -> None:
    directory = save_dcp(tmp_path)
    (directory / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match="does not have"):
        open_source(directory)


def test_a_flat_dcp_state_dict_is_weights_as_a_whole(tmp_path: Path) -> None:
    save_with_dcp({"model.a": torch.ones(2), "head": torch.ones(3)}, checkpoint_id=tmp_path / "d")
    assert {p.name for p in open_source(tmp_path / "d").parts} == {"model.a", "head"}


def test_the_weights_may_be_below_another_key(tmp_path: Path) -> None:
    """As in the recipe of DCP, whose state is `{"app": AppState(model, optimizer)}`."""
    weights, moment = {"0.weight": torch.ones(2), "head": torch.ones(3)}, torch.zeros(2)
    inside = {"optim": {"state": {"0.weight": {"exp_avg": moment}}, "lr": 0.1}, "model": weights}
    save_with_dcp({"app": inside, "step": 7}, checkpoint_id=tmp_path / "d")
    torch.save({"app": inside, "step": 7}, tmp_path / "x.pt")
    for place in (tmp_path / "d", tmp_path / "x.pt"):
        source = open_source(place)
        assert {part.name for part in source.parts} == weights.keys()
        assert sorted(source.left_out) == ["app.optim", "step"]


def test_weights_below_one_of_several_keys_may_be_an_average(tmp_path: Path) -> None:
    value: dict[str, Any] = {"net": {"a": torch.ones(2)}, "ema": {"module": {"a": torch.ones(2)}}}
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="a dict with net, ema; expected a state dict"):
        open_source(tmp_path / "x.pt")
    value = {"ema": {"module": {"a": torch.ones(2)}}}
    value["ema"]["itself"] = value
    torch.save(value, tmp_path / "y.pt")
    assert [part.name for part in open_source(tmp_path / "y.pt").parts] == ["a"]


def test_names_are_renamed_and_excluded_as_parameters(tmp_path: Path) -> None:
    parts = open_source(save_safetensors(tmp_path)).parts

    def names(rename: dict[str, str], *exclude: str) -> set[str]:
        return {p.name for p in select(parts, rename=rename, exclude=exclude, where=tmp_path)}

    assert names({"embed.*": "wte.*"}) == state().keys() - {"embed.weight"} | {"wte.weight"}
    assert names({"*": "body.*"}) == {f"body.{name}" for name in state()}
    assert names({}, "embed", "half") == state().keys() - {"embed.weight", "half"}
    with pytest.raises(KeyMismatchError, match="nothing"):
        names({"nothing.*": "x.*"})
    with pytest.raises(KeyMismatchError, match="would both be"):
        names({"half": "count"})
    with pytest.raises(CheckpointError, match="leaves no key"):
        names({}, *state())
