"""Reading `.metadata`: stock pickles are read, and hostile pickles run no code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OlderProperties
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
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
from holdfast.trainer.loading.reader import load_state


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._command = f"touch {target}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def make_metadata(path: str = "__0_0.distcp") -> Metadata:
    size = torch.Size([2, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    properties = TensorProperties(dtype=torch.bfloat16)
    return Metadata(
        {"a": TensorStorageMetadata(properties, size, [chunk]), "b": BytesStorageMetadata()},
        planner_data={"a": ("a",), "b": ("b",)},
        storage_data={MetadataIndex("a", size): _StorageInfo(path, 0, 12)},
        storage_meta=StorageMeta(checkpoint_id=Path("/somewhere"), save_id="1"),
    )


def test_metadata_of_dcp_round_trips() -> None:
    metadata = make_metadata()
    metadata.storage_meta = StorageMeta(checkpoint_id="/somewhere", save_id="1")
    for protocol in (2, 4, 5):
        assert parse_metadata(pickle.dumps(metadata, protocol), "here") == metadata


def test_a_checkpoint_id_saved_as_a_path_is_read_as_text() -> None:
    metadata = make_metadata()
    parsed = parse_metadata(pickle.dumps(metadata), "here")
    assert parsed.storage_meta is not None
    assert parsed.storage_meta.checkpoint_id == "/somewhere"


def test_tensor_properties_from_before_torch_2_3_are_read_like_stock_dcp() -> None:
    metadata, older = make_metadata(), make_metadata()
    entry = older.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.properties = OlderProperties(dtype=torch.bfloat16)  # type: ignore[assignment]
    assert parse_metadata(pickle.dumps(older), "here").storage_data == metadata.storage_data
    assert parse_metadata(pickle.dumps(older), "here").state_dict_metadata == (
        metadata.state_dict_metadata
    )


def test_metadata_that_stock_dcp_wrote_is_read_like_stock_dcp(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3, dtype=torch.float64), "n": 4, "q": torch.zeros(1).to(torch.int8)}
    save(state, checkpoint_id=tmp_path)
    ours, stock = open_checkpoint(tmp_path).metadata, FileSystemReader(tmp_path).read_metadata()
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.storage_data == stock.storage_data


def test_a_hostile_pickle_runs_no_code(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    metadata = make_metadata()
    metadata.planner_data = Hostile(target)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match="which DCP never writes"):
        load_state(tmp_path, {"a": torch.zeros(2, 3)}, group=None)
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps(make_metadata())[:-20],
        pickle.dumps({"a": 1}),
        pickle.dumps(torch.nn.Module),
        pickle.dumps(getattr),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x0bhub.loading\x93.",
        b"ctorch\nload\n.",
    ],
)
def test_content_that_is_not_dcp_metadata_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="here"):
        parse_metadata(content, "here")


def test_files_outside_the_directory_are_refused(tmp_path: Path) -> None:
    metadata = make_metadata("../other/__0_0.distcp")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match="outside the directory"):
        load_state(tmp_path, {"a": torch.zeros(2, 3)}, group=None)


def test_a_byte_entry_that_is_not_a_plain_value_is_not_unpickled(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    save({"a": Hostile(target)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(Exception, match="which a plain value does not need"):
        load_state(tmp_path / "c", {"a": 0}, group=None)
    assert not target.exists()


def test_a_directory_without_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="expected the directory of a DCP checkpoint"):
        open_checkpoint(tmp_path)
