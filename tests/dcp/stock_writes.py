"""Holdfast reads checkpoints from every save function of stock DCP."""

from __future__ import annotations

import datetime
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dcp.planners import DdpLoadBalancing, Doubled, Fp16, RenameOnSave, SaveExtraData
from tests.dcp.testbed import Testbed, assert_same, flat_state, plain_state, whole, zeros
from tests.support.checkpoint_program import make_state
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


def save(testbed: Testbed) -> None:
    """`save`: every kind of entry; also with the caller's process group."""
    for number, group in enumerate((None, testbed.group)):
        directory = testbed.place(f"save-{number}")
        state_dict_saver.save(testbed.state(), checkpoint_id=directory, process_group=group)
        expect_all(testbed, directory)


def expect_all(testbed: Testbed, directory: Path) -> None:
    """Holdfast loads the whole state and reports no unread keys."""
    state = testbed.blank()
    report = testbed.load(directory, state)
    assert_same(state, testbed.state())
    assert report.missing == report.extra == report.converted == ()


def save_state_dict_deprecated(testbed: Testbed) -> None:
    directory = testbed.place("save_state_dict")
    with pytest.warns(FutureWarning, match="deprecated"):
        save_state_dict(testbed.state(), FileSystemWriter(directory))
    # The deprecated function saves no paths of nested keys; the keys are the same.
    expect_all(testbed, directory)


def writer_options(testbed: Testbed) -> None:
    """Every option of `FileSystemWriter`."""
    variants: tuple[dict[str, Any], ...] = (
        {"single_file_per_rank": False, "thread_count": 2},
        {"single_file_per_rank": True, "thread_count": 2, "per_thread_copy_ahead": 1},
        {"sync_files": False, "overwrite": False, "cache_staged_state_dict": True},
    )
    for number, options in enumerate(variants):
        writer = FileSystemWriter(testbed.place(f"writer-{number}"), **options)
        state_dict_saver.save(testbed.state(), storage_writer=writer)
        expect_all(testbed, testbed.place(f"writer-{number}"))


class OwnWriter(FileSystemWriter):
    """A custom writer with its own storage metadata."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(self.path, "mine")


def own_storage_writer(testbed: Testbed) -> None:
    directory = testbed.place("own-writer")
    state_dict_saver.save(testbed.state(), storage_writer=OwnWriter(directory))
    expect_all(testbed, directory)
    with pytest.raises(TypeError, match="storage_writer"):
        testbed.engine.save(  # type: ignore[call-arg]
            {}, {}, step=9, reason="interval", parent=None, storage_writer=OwnWriter(directory)
        )


class OwnStager(AsyncStager):
    """Copies synchronously; records its calls."""

    def __init__(self) -> None:
        self.staged = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.staged += 1
        return BlockingAsyncStager().stage(state_dict)

    def synchronize_staging(self) -> None:
        """`stage` has already copied."""

    def close(self) -> None:
        """Nothing to release."""


def async_save(testbed: Testbed) -> None:
    """`async_save` in a thread: the default stager, the blocking one, and a custom one."""
    own = OwnStager()
    assert own.should_synchronize_after_execute
    # The cached copy is pinned memory, which needs an accelerator.
    is_cached = torch.cuda.is_available()
    blocking = BlockingAsyncStager(cache_staged_state_dict=is_cached)
    where = testbed.place("async-writer")
    writer = FileSystemWriter(where, cache_staged_state_dict=is_cached)
    staged = {"async_stager": blocking}
    variants: tuple[tuple[Path, dict[str, Any]], ...] = (
        (testbed.place("async-0"), {"checkpoint_id": testbed.place("async-0")}),
        (testbed.place("async-1"), {"checkpoint_id": testbed.place("async-1")} | staged),
        (
            testbed.place("async-2"),
            {"checkpoint_id": testbed.place("async-2"), "async_stager": own},
        ),
        (where, {"storage_writer": writer}),
    )
    for directory, options in variants:
        future = state_dict_saver.async_save(
            testbed.state(), process_group=testbed.group, **options
        )
        assert isinstance(future, Future)
        future.result()
        expect_all(testbed, directory)
    assert own.staged == 1


def async_save_process(testbed: Testbed) -> None:
    """`async_save` in a separate process."""
    directory = testbed.place("async-process")
    kind = AsyncCheckpointerType.PROCESS
    future = state_dict_saver.async_save(
        testbed.state(), checkpoint_id=directory, async_checkpointer_type=kind
    )
    assert isinstance(future, Future)
    future.result()
    expect_all(testbed, directory)


class App:
    """A `Stateful` as in tutorials: model and optimizer under one name."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.state["model"], "optim": self.state["optimizer"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("this object is never loaded into")


def stateful(testbed: Testbed) -> None:
    """A tutorial's `Stateful` is loaded as model and optimizer by renaming its keys."""
    directory = testbed.place("stateful")
    state_dict_saver.save({"app": App(testbed.state())}, checkpoint_id=directory)
    model, optimizer = make_state(testbed.world_size, steps=1, seed=5)
    names = {"app.model.*": "model.*", "app.optim.*": "optimizer.*"}
    report = load_checkpoint(directory, model, optimizer, rename=names)
    assert len(report.renamed) == report.restored
    expected, _ = make_state(testbed.world_size, steps=2, seed=0)
    assert_same(model.state_dict(), expected.state_dict())


def planner_options(testbed: Testbed) -> None:
    """Every option of `DefaultSavePlanner` on a nested state; without flattening, a flat state."""
    for number, options in enumerate(
        (
            {"dedup_save_to_lowest_rank": True, "dedup_replicated_tensors": True},
            {"flatten_sharded_tensors": False},
            {"enable_plan_caching": True},
        )
    ):
        directory = testbed.place(f"planner-{number}")
        planner = DefaultSavePlanner(**options)
        state_dict_saver.save(testbed.state(), checkpoint_id=directory, planner=planner)
        expect_all(testbed, directory)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state_dict_saver.save(flat_state(0), checkpoint_id=testbed.place("flat"), planner=planner)
    state = zeros(flat_state(5))
    testbed.load(testbed.place("flat"), state)
    assert_same(state, flat_state(0))


def unflattened_refused(testbed: Testbed) -> None:
    """A nested state saved without flattening is one pickle, so its keys cannot be loaded."""
    directory = testbed.place("unflattened")
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state_dict_saver.save(
        {"model": plain_state(0)["odd"]}, checkpoint_id=directory, planner=planner
    )
    state = {"model": zeros(plain_state(0)["odd"])}
    with pytest.raises(KeyMismatchError, match="wanted but not saved") as mismatch:
        testbed.load(directory, state)
    assert "model.bf16" in mismatch.value.missing
    assert mismatch.value.extra == ("model",)
    assert_same(state, {"model": zeros(plain_state(0)["odd"])})


def save_planner_examples(testbed: Testbed) -> None:
    """The four examples of `SavePlanner`, and the default planner's extension points."""
    place = testbed.place
    state_dict_saver.save(flat_state(0), checkpoint_id=place("renamed"), planner=RenameOnSave())
    state = zeros(flat_state(0)) | {"number": 9}
    names = {f"foo_{key}": key for key in state}
    report = testbed.load(place("renamed"), state, rename=names)
    assert_same(state, flat_state(0))
    assert len(report.renamed) == len(state)

    state_dict_saver.save(testbed.state()["model"], checkpoint_id=place("fp16"), planner=Fp16())
    model = testbed.blank()["model"]
    report = testbed.load(place("fp16"), model)
    assert_same(model, {key: v.half().float() for key, v in testbed.state()["model"].items()})
    assert "0.weight: float16 to float32" in report.converted

    state_dict_saver.save(
        flat_state(0), checkpoint_id=place("balanced"), planner=DdpLoadBalancing()
    )
    assert len(list(place("balanced").glob("*.distcp"))) == testbed.world_size
    state = zeros(flat_state(0)) | {"number": 9}
    testbed.load(place("balanced"), state)
    assert_same(state, flat_state(0))

    planner = SaveExtraData(flatten_state_dict=False)
    state_dict_saver.save(flat_state(0), checkpoint_id=place("extra"), planner=planner)
    state = zeros(flat_state(0)) | {"number": 9}
    testbed.load(place("extra"), state)
    assert_same(state, flat_state(0))

    doubled = Doubled()
    state_dict_saver.save(flat_state(0), checkpoint_id=place("doubled"), planner=doubled)
    assert doubled.looked_up
    state = zeros(flat_state(0)) | {"number": 9}
    testbed.load(place("doubled"), state)
    expected = {k: v * 2 if torch.is_tensor(v) else v for k, v in flat_state(0).items()}
    assert_same(state, expected)


def converted_torch_save(testbed: Testbed) -> None:
    """A `torch.save` file converted by `torch_save_to_dcp` loads into sharded tensors."""
    path, directory = testbed.place("whole.pt"), testbed.place("from-torch-save")
    state = whole(testbed.state())
    testbed.by_rank_0(lambda: torch.save(state, path))
    testbed.by_rank_0(lambda: torch_save_to_dcp(path, directory))
    expect_all(testbed, directory)


def objects_refused(testbed: Testbed) -> None:
    """Objects that only a pickle can hold are refused by name on every rank, not skipped."""
    directory = testbed.place("objects")
    odd = {"t": torch.ones(3), "when": datetime.date(2020, 1, 1)}
    state_dict_saver.save(odd, checkpoint_id=directory)
    with pytest.raises(CheckpointError, match="when"):
        testbed.load(directory, {"t": torch.zeros(3), "when": None})
    with pytest.raises(KeyMismatchError) as mismatch:
        testbed.load(directory, {"t": torch.zeros(3)})
    assert mismatch.value.extra == ("when",)
    state = {"t": torch.zeros(3)}
    report = testbed.load(directory, state, exclude=["when"])
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
