"""Holdfast reads what stock DCP wrote, by each of its names."""

from __future__ import annotations

import datetime
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint_program import make_state
from tests.dcp.planners import DdpLoadBalancing, Doubled, Fp16, RenameOnSave, SaveExtraData
from tests.dcp.stand import Stand, assert_same, flat_state, plain_state, whole, zeros
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    save_state_dict,
)

from holdfast.contracts.errors import CheckpointError, KeyMismatchError
from holdfast.trainer import load_checkpoint


def save(stand: Stand) -> None:
    """`save`: every kind of entry, with a process group of the caller's too."""
    for number, group in enumerate((None, stand.group)):
        directory = stand.place(f"save-{number}")
        state_dict_saver.save(stand.state(), checkpoint_id=directory, process_group=group)
        expect_all(stand, directory)


def expect_all(stand: Stand, directory: Path) -> None:
    """Holdfast reads the whole state back, and says that nothing was left."""
    state = stand.blank()
    report = stand.load(directory, state)
    assert_same(state, stand.state())
    assert report.missing == report.extra == report.converted == ()


def save_state_dict_deprecated(stand: Stand) -> None:
    directory = stand.place("save_state_dict")
    with pytest.warns(FutureWarning, match="deprecated"):
        save_state_dict(stand.state(), FileSystemWriter(directory))
    # The deprecated function plans without the paths of nested keys; the keys are the same.
    expect_all(stand, directory)


def writer_options(stand: Stand) -> None:
    """Every option of `FileSystemWriter`."""
    variants: tuple[dict[str, Any], ...] = (
        {"single_file_per_rank": False, "thread_count": 2},
        {"single_file_per_rank": True, "thread_count": 2, "per_thread_copy_ahead": 1},
        {"sync_files": False, "overwrite": False, "cache_staged_state_dict": True},
    )
    for number, options in enumerate(variants):
        writer = FileSystemWriter(stand.place(f"writer-{number}"), **options)
        state_dict_saver.save(stand.state(), storage_writer=writer)
        expect_all(stand, stand.place(f"writer-{number}"))


class OwnWriter(FileSystemWriter):
    """A writer of one's own, with metadata about its storage."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(self.path, "mine")


def own_storage_writer(stand: Stand) -> None:
    directory = stand.place("own-writer")
    state_dict_saver.save(stand.state(), storage_writer=OwnWriter(directory))
    expect_all(stand, directory)
    with pytest.raises(TypeError, match="storage_writer"):
        stand.engine.save(  # type: ignore[call-arg]
            {}, {}, step=9, reason="interval", parent=None, storage_writer=OwnWriter(directory)
        )


class OwnStager(AsyncStager):
    """Copies at once; notes that it was asked."""

    def __init__(self) -> None:
        self.staged = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.staged += 1
        return BlockingAsyncStager().stage(state_dict)

    def synchronize_staging(self) -> None:
        """The copy is made at once."""

    def close(self) -> None:
        """Nothing is held."""


def async_save(stand: Stand) -> None:
    """`async_save` in a thread: the default stager, the blocking one, one of the caller's."""
    own = OwnStager()
    assert own.should_synchronize_after_execute
    # The cached copy is pinned memory, which needs an accelerator.
    is_cached = torch.cuda.is_available()
    blocking = BlockingAsyncStager(cache_staged_state_dict=is_cached)
    where = stand.place("async-writer")
    writer = FileSystemWriter(where, cache_staged_state_dict=is_cached)
    staged = {"async_stager": blocking}
    variants: tuple[tuple[Path, dict[str, Any]], ...] = (
        (stand.place("async-0"), {"checkpoint_id": stand.place("async-0")}),
        (stand.place("async-1"), {"checkpoint_id": stand.place("async-1")} | staged),
        (stand.place("async-2"), {"checkpoint_id": stand.place("async-2"), "async_stager": own}),
        (where, {"storage_writer": writer}),
    )
    for directory, options in variants:
        future = state_dict_saver.async_save(stand.state(), process_group=stand.group, **options)
        assert isinstance(future, Future)
        future.result()
        expect_all(stand, directory)
    assert own.staged == 1


def async_save_process(stand: Stand) -> None:
    """`async_save` in a process of its own."""
    directory = stand.place("async-process")
    kind = AsyncCheckpointerType.PROCESS
    future = state_dict_saver.async_save(
        stand.state(), checkpoint_id=directory, async_checkpointer_type=kind
    )
    assert isinstance(future, Future)
    future.result()
    expect_all(stand, directory)


class App:
    """A `Stateful` such as tutorials have: model and optimizer under one name."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.state["model"], "optim": self.state["optimizer"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded into this one")


def stateful(stand: Stand) -> None:
    """A tutorial's `Stateful` becomes a model and its optimizer by a renaming."""
    directory = stand.place("stateful")
    state_dict_saver.save({"app": App(stand.state())}, checkpoint_id=directory)
    model, optimizer = make_state(stand.world_size, steps=1, seed=5)
    names = {"app.model.*": "model.*", "app.optim.*": "optimizer.*"}
    report = load_checkpoint(directory, model, optimizer, rename=names)
    assert len(report.renamed) == report.restored
    expected, _ = make_state(stand.world_size, steps=2, seed=0)
    assert_same(model.state_dict(), expected.state_dict())


def planner_options(stand: Stand) -> None:
    """Every option of `DefaultSavePlanner` on a nested state; without flattening, on a flat one."""
    for number, options in enumerate(
        (
            {"dedup_save_to_lowest_rank": True, "dedup_replicated_tensors": True},
            {"flatten_sharded_tensors": False},
            {"enable_plan_caching": True},
        )
    ):
        directory = stand.place(f"planner-{number}")
        planner = DefaultSavePlanner(**options)
        state_dict_saver.save(stand.state(), checkpoint_id=directory, planner=planner)
        expect_all(stand, directory)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state_dict_saver.save(flat_state(0), checkpoint_id=stand.place("flat"), planner=planner)
    state = zeros(flat_state(5))
    stand.load(stand.place("flat"), state)
    assert_same(state, flat_state(0))


def unflattened_refused(stand: Stand) -> None:
    """A nested state saved without flattening is one pickle: its keys are not there to load."""
    directory = stand.place("unflattened")
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state_dict_saver.save(
        {"model": plain_state(0)["odd"]}, checkpoint_id=directory, planner=planner
    )
    state = {"model": zeros(plain_state(0)["odd"])}
    with pytest.raises(KeyMismatchError, match="wanted but not saved") as mismatch:
        stand.load(directory, state)
    assert "model.bf16" in mismatch.value.missing
    assert mismatch.value.extra == ("model",)
    assert_same(state, {"model": zeros(plain_state(0)["odd"])})


def save_planner_examples(stand: Stand) -> None:
    """The four examples of `SavePlanner`, and the default planner's extension points."""
    place = stand.place
    state_dict_saver.save(flat_state(0), checkpoint_id=place("renamed"), planner=RenameOnSave())
    state = zeros(flat_state(0)) | {"number": 9}
    names = {f"foo_{key}": key for key in state}
    report = stand.load(place("renamed"), state, rename=names)
    assert_same(state, flat_state(0))
    assert len(report.renamed) == len(state)

    state_dict_saver.save(stand.state()["model"], checkpoint_id=place("fp16"), planner=Fp16())
    model = stand.blank()["model"]
    report = stand.load(place("fp16"), model)
    assert_same(model, {key: v.half().float() for key, v in stand.state()["model"].items()})
    assert "0.weight: float16 to float32" in report.converted

    state_dict_saver.save(
        flat_state(0), checkpoint_id=place("balanced"), planner=DdpLoadBalancing()
    )
    assert len(list(place("balanced").glob("*.distcp"))) == stand.world_size
    state = zeros(flat_state(0)) | {"number": 9}
    stand.load(place("balanced"), state)
    assert_same(state, flat_state(0))

    planner = SaveExtraData(flatten_state_dict=False)
    state_dict_saver.save(flat_state(0), checkpoint_id=place("extra"), planner=planner)
    state = zeros(flat_state(0)) | {"number": 9}
    stand.load(place("extra"), state)
    assert_same(state, flat_state(0))

    doubled = Doubled()
    state_dict_saver.save(flat_state(0), checkpoint_id=place("doubled"), planner=doubled)
    assert doubled.looked_up
    state = zeros(flat_state(0)) | {"number": 9}
    stand.load(place("doubled"), state)
    expected = {k: v * 2 if torch.is_tensor(v) else v for k, v in flat_state(0).items()}
    assert_same(state, expected)


def converted_torch_save(stand: Stand) -> None:
    """What `torch_save_to_dcp` makes of a file by `torch.save`, into sharded tensors."""
    path, directory = stand.place("whole.pt"), stand.place("from-torch-save")
    state = whole(stand.state())
    stand.by_rank_0(lambda: torch.save(state, path))
    stand.by_rank_0(lambda: torch_save_to_dcp(path, directory))
    expect_all(stand, directory)


def objects_refused(stand: Stand) -> None:
    """What only a pickle can hold is refused by its name on every rank, and not skipped."""
    directory = stand.place("objects")
    odd = {"t": torch.ones(3), "when": datetime.date(2020, 1, 1)}
    state_dict_saver.save(odd, checkpoint_id=directory)
    with pytest.raises(CheckpointError, match="when"):
        stand.load(directory, {"t": torch.zeros(3), "when": None})
    with pytest.raises(KeyMismatchError) as mismatch:
        stand.load(directory, {"t": torch.zeros(3)})
    assert mismatch.value.extra == ("when",)
    state = {"t": torch.zeros(3)}
    report = stand.load(directory, state, exclude=["when"])
    assert report.excluded == ("when",)
    assert_same(state, {"t": torch.ones(3)})


CHECKS = (
    save,
    save_state_dict_deprecated,
    writer_options,
    own_storage_writer,
    async_save,
    stateful,
    planner_options,
    unflattened_refused,
    save_planner_examples,
    converted_torch_save,
    objects_refused,
)
SLOW_CHECKS = (async_save_process,)
