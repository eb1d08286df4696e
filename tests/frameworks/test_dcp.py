"""`holdfast.trainer.dcp` in a single process, beside stock DCP."""

from __future__ import annotations

import datetime
import io
import os
import shutil
import signal
import subprocess
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frameworks.dcp_states import (
    Counter,
    Doubles,
    State,
    is_same,
    make_state,
    saved_date,
    stock,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError, SaveError
from holdfast.trainer import Session, dcp, placed
from holdfast.trainer.dcp.channel import DcpLoadError, DcpSaveError

FILES = [".metadata", "__0_0.distcp", "manifest.json"]


pytestmark = pytest.mark.usefixtures("end_flusher", "ignore_stock_hints")


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- both directions ------------------------------------------------------------------------------


def test_what_it_saves_is_loaded_by_it_and_by_stock_dcp(tmp_path: Path) -> None:
    metadata = dcp.save(make_state(3), checkpoint_id=tmp_path / "a").state_dict_metadata
    assert (names_in(tmp_path / "a"), {"model.0.weight", "memory"} - {*metadata}) == (FILES, set())
    for load in (dcp.load, stock.load):
        state = make_state(9)
        load(state, checkpoint_id=tmp_path / "a")
        assert is_same(state, make_state(3))


def test_what_stock_dcp_saves_is_loaded(tmp_path: Path) -> None:
    stock.save(make_state(4), checkpoint_id=tmp_path / "a")
    state = make_state(9)
    dcp.load(state, checkpoint_id=str(tmp_path / "a"))
    assert is_same(state, make_state(4))


def test_stateful_objects_are_called_as_by_stock_dcp(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    dcp.save({"model": model, "counter": Counter(7)}, checkpoint_id=tmp_path / "a")
    other, counter = torch.nn.Linear(3, 3), Counter(0)
    state = {"model": other, "counter": counter}
    dcp.load(state, checkpoint_id=tmp_path / "a")
    assert counter.count == 7
    assert state["counter"] is counter
    assert torch.equal(other.weight, model.weight)


def test_other_names_are_those_of_stock_dcp() -> None:
    from holdfast.trainer.dcp import FileSystemReader as reader

    assert reader is stock.FileSystemReader
    assert dcp.state_dict.get_model_state_dict is stock.state_dict.get_model_state_dict
    assert dcp.AsyncCheckpointerType is AsyncCheckpointerType
    assert {"save", "DefaultSavePlanner"} <= set(dir(dcp))
    with pytest.raises(AttributeError, match=r"neither has 'torch\.distributed"):
        dcp.no_such_name  # noqa: B018


# --- commit ---------------------------------------------------------------------------------------


def test_each_save_has_a_manifest_with_the_digests_of_its_files(tmp_path: Path) -> None:
    dcp.save(make_state(1), checkpoint_id=tmp_path / "a")
    first = read_manifest(tmp_path / "a")
    dcp.save(make_state(2), checkpoint_id=tmp_path / "b")
    second = read_manifest(tmp_path / "b")
    assert first is not None
    assert second is not None
    assert find_damage(tmp_path / "b", second) == []
    assert second.parent == str(tmp_path / "a")
    assert second.step == first.step + 1


def test_a_checkpoint_may_be_renamed(tmp_path: Path) -> None:
    dcp.save(make_state(1), checkpoint_id=tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "kept")
    state = make_state(9)
    dcp.load(state, checkpoint_id=tmp_path / "kept")
    assert is_same(state, make_state(1))


def test_a_second_save_replaces_the_first_and_leaves_other_files(tmp_path: Path) -> None:
    target = tmp_path / "last"
    target.mkdir()
    (target / "config.json").write_text("{}")
    for seed in (1, 2, 3):
        dcp.save(make_state(seed), checkpoint_id=target)
    assert names_in(target) == sorted([*FILES, "config.json"])
    state = make_state(9)
    dcp.load(state, checkpoint_id=target)
    assert is_same(state, make_state(3))


def test_it_replaces_a_checkpoint_of_stock_dcp_and_is_replaced_by_one(tmp_path: Path) -> None:
    for save, seed in ((stock.save, 1), (dcp.save, 2)):
        save(make_state(seed), checkpoint_id=tmp_path)
        state = make_state(9)
        dcp.load(state, checkpoint_id=tmp_path)
        assert is_same(state, make_state(seed))


def test_damaged_bytes_are_not_loaded(tmp_path: Path) -> None:
    dcp.save(make_state(1), checkpoint_id=tmp_path)
    path = tmp_path / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="checksum"):
        dcp.load(make_state(9), checkpoint_id=tmp_path)


def test_a_failed_save_raises_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    dcp.save(make_state(1), checkpoint_id=tmp_path / "a")
    with pytest.raises(DcpSaveError, match=r"cannot pickle") as raised:
        dcp.save({"generator": (x for x in "ab")}, checkpoint_id=tmp_path / "a")
    assert isinstance(raised.value, SaveError)
    assert isinstance(raised.value, CheckpointException)
    assert isinstance(raised.value.failures[0][0], TypeError)
    (tmp_path / "file").write_text("")
    with pytest.raises(DcpSaveError, match="file"):
        dcp.save(make_state(1), checkpoint_id=tmp_path / "file")
    state = make_state(9)
    dcp.load(state, checkpoint_id=tmp_path / "a")
    assert is_same(state, make_state(1))


def test_the_name_of_a_run_s_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DcpSaveError, match="name of a checkpoint of a run"):
        dcp.save(make_state(1), checkpoint_id=tmp_path / "step-00000001.a0001.l01")


# --- killed saves ---------------------------------------------------------------------------------


def unpublished(folder: Path) -> Path:
    """A directory with checkpoint 1, and checkpoint 2 committed beside it, not moved up yet."""
    target = folder / "target"
    dcp.save(make_state(1), checkpoint_id=target)
    dcp.save(make_state(2), checkpoint_id=folder / "new")
    manifest = read_manifest(folder / "new")
    assert manifest is not None
    (folder / "new").rename(target / manifest.name)
    return target


def publish_until(saving: Path, calls: int) -> bool:
    """Move a save up in a child that kills itself at its storage call number `calls`.

    Return True if the child finished before that.
    """
    pid = os.fork()
    if pid == 0:
        left = calls

        def counted(call: Any) -> Any:
            def act(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return call(*arguments, **named)

            return act

        for name in ("rename", "unlink", "fsync", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            placed.publish(saving)
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def test_a_kill_at_any_storage_call_of_the_move_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    begun = unpublished(tmp_path / "begun")
    seen_by_stock = set()
    for calls in range(40):
        target = tmp_path / f"killed {calls}"
        shutil.copytree(begun, target)
        (saving,) = target.glob(f"{placed.SAVING}*")
        is_done = publish_until(saving, calls)
        if (target / ".metadata").exists():
            state = make_state(9)
            stock.load(state, checkpoint_id=target)
            seen_by_stock |= {seed for seed in (1, 2) if is_same(state, make_state(seed))}
        else:
            seen_by_stock.add(0)
        state = make_state(9)
        dcp.load(state, checkpoint_id=target)
        assert is_same(state, make_state(2)), calls
        assert names_in(target) == FILES
        shutil.rmtree(target)
        if is_done:
            break
    assert is_done
    assert calls > 8
    assert seen_by_stock == {0, 1, 2}


def test_a_save_that_was_killed_before_its_commit_is_ignored_and_removed(tmp_path: Path) -> None:
    target = unpublished(tmp_path)
    (saving,) = target.glob(f"{placed.SAVING}*")
    (saving / "manifest.json").unlink()
    state = make_state(9)
    dcp.load(state, checkpoint_id=target)
    assert is_same(state, make_state(1))
    dcp.save(make_state(3), checkpoint_id=target)
    assert names_in(target) == FILES


# --- async_save -----------------------------------------------------------------------------------


def test_async_save_holds_the_state_of_its_call(tmp_path: Path) -> None:
    """PyTorch issue 144657."""
    state: State = {"weight": torch.zeros(1 << 18), "step": 0}
    futures = []
    for step in range(1, 6):
        state["weight"].fill_(step)
        state["step"] = step
        futures.append(dcp.async_save(state, checkpoint_id=tmp_path / str(step)))
    state["weight"].fill_(-1)
    for step, future in enumerate(futures, 1):
        assert isinstance(future, Future)
        assert "weight" in future.result(timeout=60).state_dict_metadata
        found: State = {"weight": torch.zeros(1 << 18), "step": 0}
        dcp.load(found, checkpoint_id=tmp_path / str(step))
        assert found["step"] == step
        assert bool((found["weight"] == step).all())


def test_async_saves_into_one_directory_end_with_the_last(tmp_path: Path) -> None:
    futures = [dcp.async_save(make_state(n), checkpoint_id=tmp_path) for n in range(1, 5)]
    for future in futures:
        assert isinstance(future, Future)
        assert future.exception(timeout=60) is None
    state = make_state(9)
    dcp.load(state, checkpoint_id=tmp_path)
    assert is_same(state, make_state(4))
    assert names_in(tmp_path) == FILES


def test_a_stager_that_stages_asynchronously_gets_stock_dcp_s_response(tmp_path: Path) -> None:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    made = dcp.async_save(
        make_state(1),
        checkpoint_id=tmp_path,
        async_stager=stager,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(made, AsyncSaveResponse)
    assert made.staging_completion.done()
    made.upload_completion.result(timeout=60)
    assert read_manifest(tmp_path) is not None
    stager.close()


def test_a_failed_async_save_fails_its_future(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    future = dcp.async_save(make_state(1), checkpoint_id=tmp_path / "file")
    assert isinstance(future, Future)
    with pytest.raises(SaveError, match="file"):
        future.result(timeout=60)


# --- errors ---------------------------------------------------------------------------------------


def test_addresses_and_missing_directories_are_stock_dcp_s_errors(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not a local path"), pytest.raises(RuntimeError):
        dcp.save({}, checkpoint_id="abc://abc.abc")
    with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        dcp.save({})
    with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        dcp.load({})
    with pytest.raises(DcpLoadError, match="no checkpoint is here") as raised:
        dcp.load({}, checkpoint_id=tmp_path / "none")
    assert isinstance(raised.value, CheckpointError)
    assert isinstance(raised.value.failures[0][0], FileNotFoundError)


def test_an_empty_state_is_a_checkpoint(tmp_path: Path) -> None:
    dcp.save({}, checkpoint_id=tmp_path)
    dcp.load({}, checkpoint_id=tmp_path)
    assert read_manifest(tmp_path) is not None


# --- pickles --------------------------------------------------------------------------------------


def test_no_entry_runs_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return subprocess.check_call, (["touch", str(tmp_path / "attacked")],)

    for save in (dcp.save, stock.save):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save({"x": Attack()}, checkpoint_id=tmp_path / save.__module__)
        for planner in (None, Doubles()):
            with pytest.raises((DamagedCheckpointError, CheckpointException)):
                dcp.load({"x": None}, checkpoint_id=tmp_path / save.__module__, planner=planner)
    assert not (tmp_path / "attacked").exists()


def test_classes_that_the_program_allows_are_loaded(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"date: it names datetime\.date"):
        dcp.save(saved_date(3), checkpoint_id=tmp_path)
    found = {"weight": torch.zeros(3), "date": None}
    with pytest.raises(DamagedCheckpointError, match=r"date: .*datetime\.date"):
        dcp.load(found, checkpoint_id=tmp_path)
    with torch.serialization.safe_globals([datetime.date]):
        dcp.load(found, checkpoint_id=tmp_path)
    assert found["date"] == datetime.date(2020, 1, 4)


def test_values_may_grow_and_shrink_between_saves(tmp_path: Path) -> None:
    for size in (1, 300, 40_000, 70_000, 2):
        state = {"memory": io.BytesIO(bytes(size)), "text": "x" * size, "list": list(range(size))}
        dcp.save(state, checkpoint_id=tmp_path)
        found: State = {"memory": None, "text": "", "list": []}
        dcp.load(found, checkpoint_id=tmp_path)
        assert is_same(found, state)


# --- beside a session -----------------------------------------------------------------------------


def test_it_works_while_a_session_is_open(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, directory=tmp_path / "run", interval=1)
    for step in session.steps(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        dcp.save({"model": model}, checkpoint_id=tmp_path / f"own-{step}")
    session.close()
    other = torch.nn.Linear(4, 4)
    dcp.load({"model": other}, checkpoint_id=tmp_path / "own-3")
    assert torch.equal(other.weight, model.weight)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 3
