"""`.metadata` of every minor version of torch, and of every Python, is read.

`torch_metadata/write.py` made the files. A later torch may pickle more fields than these versions
do: the reader accepts them, and a test here fails so that a person looks at what they mean.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemReader,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.trainer.format.metadata import open_checkpoint, parse_metadata
from holdfast.trainer.format.metadata_makers import BUILDS, KEY_TYPES, PROPERTIES, find_maker
from holdfast.trainer.format.opcodes import dump_metadata
from holdfast.trainer.format.plain_pickle import RefusedPickle, read_pickle

FOLDER: Final = Path(__file__).with_name("torch_metadata")
FILES: Final = (
    "torch-2.10-python-3.11",
    "torch-2.11-python-3.11",
    "torch-2.12-python-3.11",
    "torch-2.13-python-3.11",
    "torch-2.13-python-3.11.2",
    "torch-2.14-python-3.11",
    "torch-2.15-python-3.11",
    "torch-2.15-python-3.12",
    "torch-2.15-python-3.13",
)
# The first torch that saves the tensor `shard` of write.py as a part of a larger one.
SHARDS_SINCE: Final = (2, 14)
# Each key of write.py's state: its type, its shape, and its chunks.
TENSORS: Final = {
    "model.weight": (torch.float32, (3, 4), [((0, 0), (3, 4))]),
    "model.transposed": (torch.bfloat16, (4, 3), [((0, 0), (4, 3))]),
    "model.frozen": (torch.float64, (2,), [((0,), (2,))]),
    "model.scalar": (torch.int64, (), [((), ())]),
    "model.empty": (torch.bool, (0, 3), [((0, 0), (0, 3))]),
    "model.sharded": (torch.float32, (4, 2), [((0, 0), (4, 2))]),
    "groups.0.momentum": (torch.float32, (1,), [((0,), (1,))]),
}
VALUES: Final = {"groups.0.lr", "step"}

# What torch 2.10 to 2.15 pickle: by module and class, the fields or the members.
PICKLED: Final = {
    "metadata.BytesStorageMetadata": set[str](),
    "metadata.ChunkStorageMetadata": {"offsets", "sizes"},
    "metadata.Metadata": {
        *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    },
    "metadata.MetadataIndex": {"fqn", "offset", "index"},
    "metadata.StorageMeta": {"checkpoint_id", "save_id", "load_id", "modules"},
    # `strides` came with torch 2.15.
    "metadata.TensorProperties": {
        *("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"),
    },
    "metadata.TensorStorageMetadata": {"properties", "size", "chunks"},
    "metadata._MEM_FORMAT_ENCODING": {
        *("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"),
    },
    # An option of the writer, which is not in `.metadata`.
    "filesystem.SerializationFormat": {"TORCH_SAVE", "SAFETENSORS"},
    "filesystem._StorageInfo": {"relative_path", "offset", "length", "transform_descriptors"},
    "filesystem._StoragePrefix": {"prefix"},
}


@pytest.mark.parametrize("name", FILES)
def test_the_metadata_of_each_version_is_read(name: str) -> None:
    read = parse_metadata((FOLDER / f"{name}.metadata").read_bytes(), name)
    entries, version = read.state_dict_metadata, name.split("-")[1]
    has_shards = tuple(map(int, version.split("."))) >= SHARDS_SINCE
    tensors = TENSORS | {
        "shard": (torch.float32, (4, 3), [((2, 0), (2, 3))])
        if has_shards
        else (torch.float32, (2, 3), [((0, 0), (2, 3))])
    }
    found = {key: e for key, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    assert {
        key: (
            entry.properties.dtype,
            tuple(entry.size),
            [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks],
        )
        for key, entry in found.items()
    } == tensors
    assert {key for key, e in entries.items() if isinstance(e, BytesStorageMetadata)} == VALUES
    assert read.planner_data["groups.0.momentum"] == ("groups", 0, "momentum")
    assert {index.fqn for index in read.storage_data} == tensors.keys() | VALUES
    assert {info.relative_path for info in read.storage_data.values()} == {"__0_0.distcp"}
    assert read.storage_meta is not None
    assert read.storage_meta.checkpoint_id == "checkpoint"
    assert read.storage_meta.save_id


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("_MEM_FORMAT_ENCODING", "__class__"),
        ("_MEM_FORMAT_ENCODING", "mro"),
        ("Metadata", "__init__"),
        ("TensorProperties", "TORCH_CHANNELS_LAST"),
    ],
)
def test_getattr_gives_only_a_memory_format(module: str, owner: str, name: str) -> None:
    """Python 3.11.2, which Debian 12 has, pickles the memory format by `getattr`."""
    names = f"c{module}\ngetattr\nc{metadata.__name__}\n{owner}\n".encode()
    text = names + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x86R."
    with pytest.raises(RefusedPickle, match="memory format"):
        read_pickle(iter([text]), find_maker, BUILDS, keys=KEY_TYPES)


def test_there_is_a_file_of_the_torch_that_is_installed() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    assert any(name.startswith(f"torch-{minor}-") for name in FILES), (
        f"run {FOLDER / 'write.py'} with torch {minor}, and add the file to FILES"
    )
    assert {path.stem for path in FOLDER.glob("*.metadata")} == set(FILES)


def test_torch_pickles_no_class_and_no_field_that_is_not_known() -> None:
    found = dict(_pickled(metadata)) | dict(_pickled(filesystem))
    assert found.keys() == PICKLED.keys()
    for name, members in found.items():
        assert members <= PICKLED[name], f"{name} has new fields: {members - PICKLED[name]}"
    state: Any = TensorProperties().__getstate__()  # type: ignore[no-untyped-call]
    assert len(state) == len(found["metadata.TensorProperties"])
    assert CURRENT_DCP_VERSION == "1.0.0"


def _pickled(module: ModuleType) -> Iterator[tuple[str, set[str]]]:
    """Yield each class of `module` that can be in a pickle as data, with its fields or members."""
    for name, kind in vars(module).items():
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        of = f"{module.__name__.rpartition('.')[2]}.{name}"
        if issubclass(kind, enum.Enum):
            yield of, {member.name for member in kind}
        elif dataclasses.is_dataclass(kind):
            yield of, {each.name for each in dataclasses.fields(kind)}


class Later:
    """Something that a later DCP may save: a class of its own, which this torch lacks."""

    __module__ = "torch.distributed.checkpoint.later"
    __qualname__ = "Later"

    def __init__(self) -> None:
        self.content = {"a": 1}

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Make `Later` a class that can be pickled, and no longer known when it is read."""
    module = ModuleType(Later.__module__)
    module.Later = Later  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, Later.__module__, module)
    return Later()


def whole() -> Metadata:
    """Metadata with an object of each class."""
    size = torch.Size([2, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float16), size, [chunk])
    return Metadata(
        {"a": entry, "b": BytesStorageMetadata()},
        planner_data={"a": ("a",)},
        storage_data={MetadataIndex("a", chunk.offsets): _StorageInfo("__0_0.distcp", 0, 12)},
        storage_meta=StorageMeta(save_id="1"),
        version="1.0.0",
    )


def _objects(of: Metadata) -> Iterator[Any]:
    entry = of.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    (index, info), *_ = of.storage_data.items()
    yield from (of, entry, entry.chunks[0], of.state_dict_metadata["b"], of.storage_meta)
    yield from (index, info)


@pytest.mark.parametrize("value", [None, 7, "text", (1, 2), {"a": [1.5]}])
def test_a_field_that_a_later_torch_adds_is_read(value: Any) -> None:
    made = whole()
    for each in _objects(made):
        vars(each)["added"] = value
    read = parse_metadata(pickle.dumps(made), "here")
    assert read == whole()
    # A place leaves out what is None.
    assert [getattr(each, "added", None) for each in _objects(read)] == [value] * 7


def test_a_field_of_a_later_class_is_read_without_its_content(later: Later) -> None:
    made = whole()
    for each in _objects(made):
        vars(each)["added"] = later
    read = parse_metadata(pickle.dumps(made), "here")
    assert read == whole()
    assert not any(isinstance(each.added, Later) for each in _objects(read))


@pytest.mark.parametrize("added", [(None,), ((3, 1),), ((3, 1), "more", {"a": 1})])
def test_tensor_properties_with_more_values_are_read(
    added: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = whole()
    properties = next(iter(_objects(made))).state_dict_metadata["a"].properties
    state = tuple(properties.__getstate__())[:5]
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda _: (*state, *added))
    content = pickle.dumps(made)
    monkeypatch.undo()
    entry = parse_metadata(content, "here").state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.properties.dtype == torch.float16
    has_strides = "strides" in {each.name for each in dataclasses.fields(TensorProperties)}
    assert vars(entry.properties).get("strides") == (added[0] if has_strides else None)


def test_what_holdfast_pickles_has_no_field_that_an_older_torch_refuses() -> None:
    content = dump_metadata(whole())
    assert parse_metadata(content, "here") == whole() == pickle.loads(content)
    states: list[Any] = []

    def record(made: Any, state: Any) -> None:
        states.append(state)
        BUILDS[TensorProperties](made, state)

    builds = {**BUILDS, TensorProperties: record}
    read_pickle(iter([content]), find_maker, builds, keys=KEY_TYPES)
    assert [len(state) for state in states] == [PROPERTIES]


def test_an_entry_of_a_later_class_is_refused_by_its_key(later: Later) -> None:
    made = whole()
    made.state_dict_metadata["new"] = later  # type: ignore[assignment]
    with pytest.raises(DamagedCheckpointError, match="'new': an entry of type UnknownRecord"):
        parse_metadata(pickle.dumps(made), "here")


def test_what_a_planner_of_this_torch_saves_is_read(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4, 3).t(), "n": {"x": [torch.ones(1), 2]}}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    stock = FileSystemReader(tmp_path).read_metadata()
    ours = open_checkpoint(tmp_path).metadata
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.storage_data == stock.storage_data
