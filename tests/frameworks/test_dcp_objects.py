"""Planners, writers and readers of stock DCP in calls of `holdfast.trainer.dcp`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from tests.frameworks.dcp_states import Doubles, State, is_same, make_state
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemReader,
    FileSystemWriter,
)

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.trainer import dcp

pytestmark = pytest.mark.usefixtures("end_flusher", "ignore_stock_hints")


class Renames(DefaultSavePlanner):
    """Adds a prefix to all names, as an example of PyTorch's own documentation does."""

    def set_up_planner(self, state_dict: Any, *rest: Any, **named: Any) -> None:
        renamed = {f"old_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, *rest, **named)


def test_a_planner_of_the_program_s_own_is_asked(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3), "pair": ((1, 2), "x")}
    dcp.save(state, checkpoint_id=tmp_path, planner=Renames())
    assert read_manifest(tmp_path) is not None
    found: State = {"old_weight": torch.zeros(3), "old_pair": None}
    dcp.load(found, checkpoint_id=tmp_path, planner=Doubles())
    assert torch.equal(found["old_weight"], torch.full((3,), 2.0))
    assert found["old_pair"] == ((1, 2), "x")
    dcp.save(state, checkpoint_id=tmp_path)


def test_an_unflattened_state_is_saved_as_the_planner_says(tmp_path: Path) -> None:
    state: State = {"weight": torch.ones(3), "nested": {"a": torch.ones(2)}, "b": [1]}
    options = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    dcp.save(state, checkpoint_id=tmp_path, planner=DefaultSavePlanner(**options))
    found: State = {"weight": torch.zeros(3), "nested": None, "b": None}
    dcp.load(found, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(**options))
    assert is_same(found, state)


def test_partial_loads_follow_stock_dcp(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": 1}, checkpoint_id=tmp_path)
    found: State = {"a": torch.zeros(2)}
    dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["a"], torch.ones(2))
    found = {"a": torch.zeros(2), "new": torch.zeros(1)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["a"], torch.zeros(2))
    dcp.load(found, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(found["a"], torch.ones(2))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path)


def test_a_plain_file_system_writer_names_the_directory(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, thread_count=2, overwrite=False)
    dcp.save(make_state(1), storage_writer=writer)
    state = make_state(9)
    dcp.load(state, storage_reader=FileSystemReader(tmp_path))
    assert is_same(state, make_state(1))
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        dcp.save(make_state(2), storage_writer=writer)


def test_a_writer_of_the_program_s_own_is_left_to_stock_dcp_with_a_warning(tmp_path: Path) -> None:
    class Writer(FileSystemWriter):
        pass

    with pytest.warns(UserWarning, match=r"dcp\.save: the storage writer is a Writer"):
        dcp.save(make_state(1), storage_writer=Writer(tmp_path))
    assert read_manifest(tmp_path) is None
    state = make_state(9)
    dcp.load(state, checkpoint_id=tmp_path)
    assert is_same(state, make_state(1))


def test_quantized_tensors_are_left_to_stock_dcp_with_a_warning(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    state = {"a": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)}
    with pytest.warns(UserWarning, match="whose bytes are not their values"):
        dcp.save(state, checkpoint_id=tmp_path)
    assert read_manifest(tmp_path) is None
    found = {"a": torch.quantize_per_tensor(torch.zeros(2), 0.5, 0, torch.qint8)}
    dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["a"].dequantize(), torch.ones(2))


class _Inverter(io.BytesIO):
    """Sends every byte inverted to `output`."""

    def __init__(self, output: IO[bytes]) -> None:
        super().__init__()
        self._output = output

    def write(self, content: Any) -> int:
        return self._output.write(_invert(bytes(content)))


class Inverted(StreamTransformExtension):
    """Stores every byte inverted. A checkpoint that has it is read with a registry of its own."""

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        return Inverted()

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Inverter(output)

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(_invert(input.read()))


def _invert(content: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in content)


def test_a_reader_s_own_extensions_undo_those_of_the_writer(tmp_path: Path) -> None:
    state = {"weight": torch.arange(5.0), "text": "saved"}
    with pytest.warns(UserWarning, match="the FileSystemWriter has extensions"):
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path, _extensions=[Inverted()]))
    registry = ExtensionRegistry()
    registry.register(Inverted)
    found: State = {"weight": torch.zeros(5), "text": ""}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path, _extension_registry=registry))
    assert is_same(found, state)
    with pytest.raises(CheckpointException, match=r"stream\.inverted"):
        dcp.load(found, storage_reader=FileSystemReader(tmp_path))


def test_a_default_planner_of_the_caller_knows_what_was_loaded(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(2, 2)}, checkpoint_id=tmp_path)
    planner = DefaultLoadPlanner()
    model = torch.nn.Linear(2, 2)
    dcp.load({"model": model}, checkpoint_id=tmp_path, planner=planner)
    assert planner.metadata is not None
    assert planner.metadata.version == CURRENT_DCP_VERSION
    assert planner.state_dict["model.weight"].data_ptr() == model.weight.data_ptr()


def test_a_writer_and_a_reader_take_over_the_checkpoint_id(tmp_path: Path) -> None:
    writer, reader = FileSystemWriter(tmp_path / "a"), FileSystemReader(tmp_path / "a")
    dcp.save(make_state(1), storage_writer=writer, checkpoint_id=tmp_path / "b")
    dcp.save(make_state(2), storage_writer=writer)
    state = make_state(9)
    dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / "b")
    assert is_same(state, make_state(2))
    assert writer.path == reader.path == tmp_path / "b"
    recorded = FileSystemReader(tmp_path / "b").read_metadata().storage_meta
    assert recorded is not None
    assert (recorded.checkpoint_id, recorded.save_id) == (str(tmp_path / "b"), writer.save_id)
    assert not (tmp_path / "a").exists()
