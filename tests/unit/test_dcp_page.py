"""The DCP compatibility page has a row and a test for each public name of DCP's reference."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.checkpoint as dcp
from tests.dcp.program import GROUPS, names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dcp-compatibility.md"
VERDICTS = {"through", "beside", "refused"}
ROW = re.compile(r"\| (.+?) \| (\w+) \| (.+) \| `([^`]+)` \|")
# A row has one name or several. A name after a point belongs to the class before it.
NAME = re.compile(r"(example )?`([\w.]+)`")
EXPORT = re.compile(r"\| `(\w+)` \| ([\d.]*) ?\| .+ \|")
MODULES = ("", ".staging", ".stateful", ".planner", ".state_dict", ".format_utils")

# Functions, classes, their methods and options, as the reference lists them.
REFERENCE = [
    "save",
    "async_save",
    "save_state_dict",
    "load",
    "load_state_dict",
    "AsyncStager",
    "AsyncStager.should_synchronize_after_execute",
    "AsyncStager.stage",
    "AsyncStager.synchronize_staging",
    "BlockingAsyncStager",
    "BlockingAsyncStager.stage",
    "BlockingAsyncStager.synchronize_staging",
    "Stateful",
    "Stateful.state_dict",
    "Stateful.load_state_dict",
    "StorageReader",
    "StorageReader.prepare_global_plan",
    "StorageReader.prepare_local_plan",
    "StorageReader.read_data",
    "StorageReader.read_metadata",
    "StorageReader.reset",
    "StorageReader.set_up_storage_reader",
    "StorageReader.validate_checkpoint_id",
    "StorageWriter",
    "StorageWriter.finish",
    "StorageWriter.prepare_global_plan",
    "StorageWriter.prepare_local_plan",
    "StorageWriter.reset",
    "StorageWriter.set_up_storage_writer",
    "StorageWriter.storage_meta",
    "StorageWriter.validate_checkpoint_id",
    "StorageWriter.write_data",
    "LoadPlanner",
    "LoadPlanner.commit_tensor",
    "LoadPlanner.create_global_plan",
    "LoadPlanner.create_local_plan",
    "LoadPlanner.finish_plan",
    "LoadPlanner.load_bytes",
    "LoadPlanner.resolve_bytes",
    "LoadPlanner.resolve_tensor",
    "LoadPlanner.set_up_planner",
    "LoadPlan",
    "ReadItem",
    "SavePlanner",
    "SavePlanner.create_global_plan",
    "SavePlanner.create_local_plan",
    "SavePlanner.finish_plan",
    "SavePlanner.resolve_data",
    "SavePlanner.set_up_planner",
    "SavePlan",
    "WriteItem",
    "WriteItem.tensor_storage_size",
    "FileSystemReader",
    "FileSystemReader.checkpoint_id",
    "FileSystemWriter",
    "FileSystemWriter.single_file_per_rank",
    "FileSystemWriter.sync_files",
    "FileSystemWriter.thread_count",
    "FileSystemWriter.per_thread_copy_ahead",
    "FileSystemWriter.cache_staged_state_dict",
    "FileSystemWriter.overwrite",
    "FileSystemWriter.stage",
    "DefaultSavePlanner",
    "DefaultSavePlanner.flatten_state_dict",
    "DefaultSavePlanner.flatten_sharded_tensors",
    "DefaultSavePlanner.dedup_replicated_tensors",
    "DefaultSavePlanner.dedup_save_to_lowest_rank",
    "DefaultSavePlanner.lookup_object",
    "DefaultSavePlanner.transform_object",
    "DefaultLoadPlanner",
    "DefaultLoadPlanner.flatten_state_dict",
    "DefaultLoadPlanner.flatten_sharded_tensors",
    "DefaultLoadPlanner.allow_partial_load",
    "DefaultLoadPlanner.lookup_tensor",
    "DefaultLoadPlanner.transform_tensor",
    "get_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "set_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "StateDictOptions",
    "StateDictOptions.full_state_dict",
    "StateDictOptions.cpu_offload",
    "StateDictOptions.ignore_frozen_params",
    "StateDictOptions.keep_submodule_prefixes",
    "StateDictOptions.strict",
    "StateDictOptions.broadcast_from_rank0",
    "StateDictOptions.flatten_optimizer_state_dict",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
    "BroadcastingTorchSaveReader",
    "BroadcastingTorchSaveReader.prepare_global_plan",
    "BroadcastingTorchSaveReader.prepare_local_plan",
    "BroadcastingTorchSaveReader.read_data",
    "BroadcastingTorchSaveReader.read_metadata",
    "BroadcastingTorchSaveReader.reset",
    "BroadcastingTorchSaveReader.set_up_storage_reader",
    "BroadcastingTorchSaveReader.validate_checkpoint_id",
    "DynamicMetaLoadPlanner",
    "DynamicMetaLoadPlanner.set_up_planner",
]

# Planners that the reference shows as examples.
EXAMPLES = [
    "SavePlanner.RenamePlanner",
    "SavePlanner.FP16Planner",
    "SavePlanner.DDPLoadBalancingPlanner",
    "SavePlanner.SaveExtraDataPlanner",
    "LoadPlanner.RenamePlanner",
    "LoadPlanner.MetaModelMaterialize",
]


def rows() -> list[tuple[bool, str, str, str, str]]:
    lines = [
        line for line in PAGE.read_text().splitlines() if line.startswith(("| `", "| example"))
    ]
    lines = [line for line in lines if not EXPORT.fullmatch(line)]
    found = [ROW.fullmatch(line) for line in lines]
    assert all(found), [line for line, row in zip(lines, found, strict=True) if row is None]
    return [
        (is_example, name, row[2], row[3], row[4])
        for row in found
        if row is not None
        for is_example, name in names_in(row[1])
    ]


def names_in(text: str) -> Iterator[tuple[bool, str]]:
    """(whether it is an example, name) of each name in the first column of a row."""
    owner = ""
    for one in text.split(", "):
        match = NAME.fullmatch(one)
        assert match, one
        name = f"{owner}{match[2]}" if match[2].startswith(".") else match[2]
        owner = name.partition(".")[0]
        yield bool(match[1]), name


def test_every_dcp_name_has_one_row() -> None:
    assert sorted(name for is_example, name, *_ in rows() if not is_example) == sorted(REFERENCE)
    assert sorted(name for is_example, name, *_ in rows() if is_example) == sorted(EXAMPLES)
    assert {verdict for _, _, verdict, _, _ in rows()} <= VERDICTS


def test_every_exported_name_has_a_row() -> None:
    exported = {
        name
        for name, value in vars(dcp).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    others = {match[1] for match in map(EXPORT.fullmatch, PAGE.read_text().splitlines()) if match}
    assert exported - set(REFERENCE) <= others
    assert not others & set(REFERENCE)


@pytest.mark.parametrize("name", sorted({name.split(".")[0] for name in REFERENCE}))
def test_the_dcp_names_exist_in_torch(name: str) -> None:
    parts = [importlib.import_module(f"torch.distributed.checkpoint{part}") for part in MODULES]
    assert any(hasattr(part, name) for part in parts)


def test_every_test_that_the_page_names_exists() -> None:
    cases = set(names(*GROUPS))
    named = {test for *_, test in rows()}
    named |= set(re.findall(r"\(test\s+`([^`]+)`\)", PAGE.read_text()))
    assert len(named) > len(cases) / 2
    for test in named - cases:
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), test
