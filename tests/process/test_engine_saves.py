"""One rank's saves through a real flusher: late and refused saves, changed state, reconnects."""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.flusher_supervisor import SlotHolder, wait_until
from tests.support.pipeline_program import HalfPlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import DamagedCheckpointError, KeyMismatchError, SaveError
from holdfast.trainer.format.metadata import open_checkpoint
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.planning.global_plan import ALIGNMENT, GlobalPlan
from holdfast.trainer.planning.layout import TRAIN_STATE_BYTES_MAX, read_train_state
from holdfast.trainer.planning.metadata_pickle import RowPlaces, find_places
from holdfast.trainer.planning.ranks import find_shortage
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.slots.slots import FREE_STATES, Slot, SlotState
from holdfast.trainer.staging.stage import StagedSlot

# 100 MB: allocating two slots of this size takes a noticeable part of a second.
NUMBERS = 25_000_000
STARTS_MAX = 5
RELEASE_S = 60.0
FACTS: dict[str, Any] = {"reason": "interval", "parent": "r:step-00000001.a0001.l01"}


def read_keys(directory: Path) -> frozenset[str]:
    """The keys of a checkpoint."""
    return frozenset(open_checkpoint(directory).metadata.state_dict_metadata)


@pytest.fixture
def flusher_supervisor() -> Iterator[SlotHolder]:
    made = SlotHolder(f"holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    made.close()


def make_engine(flusher: str, folder: Path, planner: SavePlanner | None = None) -> CheckpointEngine:
    identity = Identity(
        run_uid="1" * 32,
        run="r",
        attempt=3,
        launch=2,
        rank=0,
        local_rank=0,
        local_ranks=1,
        world_size=1,
        node=0,
        nodes=1,
        command_digest="c" * 64,
    )
    return CheckpointEngine(
        flusher=flusher, run=RunPaths(folder / "r"), identity=identity, group=None, planner=planner
    )


@pytest.fixture
def engine(flusher_supervisor: SlotHolder, tmp_path: Path) -> Iterator[CheckpointEngine]:
    made = make_engine(flusher_supervisor.name, tmp_path)
    yield made
    made.close()


def make_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {
            "weight": torch.full((3, 5), value),
            "half": torch.full((7,), value, dtype=torch.bfloat16),
            "turned": torch.arange(6.0).reshape(2, 3).t() * value,
            "nothing": torch.empty(0, 4),
            "count": torch.tensor(int(value)),
            "mask": torch.tensor([True, False]),
        },
        "group": {"lr": value, "betas": (0.9, value), "foreach": None, "fused": False},
    }


def are_slots_mapped(engine: CheckpointEngine, timeout_s: float) -> bool:
    """Wait until the thread that maps the slots' pages is done, at most `timeout_s` seconds."""
    assert engine._stage is not None
    engine._stage._thread.join(timeout_s)
    return not engine._stage._thread.is_alive()


def directory_of(folder: Path, step: int) -> Path:
    return folder / "r" / "checkpoints" / f"step-{step:08d}.a0003.l02"


def test_no_garbage_is_collected_while_a_save_blocks_training(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over all objects of a program with a large model would take as long as the copy."""
    passes: list[int] = []
    fill = StagedSlot.fill

    def counted(*args: Any, **more: Any) -> Any:
        before = len(passes)
        done = fill(*args, **more)
        assert [[] for _ in range(10)]
        filled.append(len(passes) - before)
        return done

    filled: list[int] = []
    engine.prepare(make_state())
    monkeypatch.setattr(StagedSlot, "fill", counted)
    former = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: passes.append(1))
    gc.set_threshold(1)
    try:
        engine.save(make_state(), {}, step=1, **FACTS)
    finally:
        gc.set_threshold(*former)
        gc.callbacks.pop()
    assert filled == [0]
    assert passes
    assert gc.isenabled()


def test_values_of_every_type_are_saved_and_loaded_unchanged(
    engine: CheckpointEngine, tmp_path: Path
) -> None:
    for step, value in ((5, 1.0), (6, 0.30000000000000004), (7, float("inf")), (8, 1e-300)):
        state = make_state(0.0 if value in (float("inf"), 1e-300) else value)
        state["group"]["lr"] = value
        name = engine.save(
            state, {"step": step}, step=step, metrics={"loss": 2, "bad": float("nan")}, **FACTS
        )
        assert name == f"step-{step:08d}.a0003.l02"
        results = engine.wait(20)
        assert [(r.checkpoint, r.committed, r.error) for r in results] == [(name, True, None)]
        loaded = make_state(9.0)
        report = load_state(directory_of(tmp_path, step), loaded, group=None)
        assert (report.missing, report.extra) == ((), ())
        assert report.restored == 10
        assert loaded["group"] == state["group"]
        for key, tensor in state["model"].items():
            assert torch.equal(tensor, loaded["model"][key]), key
        assert read_train_state(
            directory_of(tmp_path, step), read_manifest(directory_of(tmp_path, step))
        ) == {"step": step}
    manifest = read_manifest(directory_of(tmp_path, 8))
    assert manifest is not None
    assert manifest.parent == FACTS["parent"]
    assert manifest.metrics["loss"] == 2.0
    assert manifest.versions["torch"] == torch.__version__
    assert 0 < manifest.flush_s < 20


def test_files_are_stock_dcp_and_aligned_and_metadata_does_not_change(
    engine: CheckpointEngine, tmp_path: Path
) -> None:
    for step in (1, 2):
        engine.save(make_state(float(step)), {}, step=step, **FACTS)
        assert engine.wait(20)[0].committed
    first, second = (directory_of(tmp_path, step) / ".metadata" for step in (1, 2))
    assert first.read_bytes() == second.read_bytes()
    metadata = open_checkpoint(directory_of(tmp_path, 2)).metadata
    assert all(info.offset % ALIGNMENT == 0 for info in metadata.storage_data.values())
    assert "model.weight" in read_keys(directory_of(tmp_path, 2))
    image = (directory_of(tmp_path, 2) / "__0_0.distcp").read_bytes()
    wanted = make_state(2.0)["model"]["weight"].numpy().tobytes()
    assert image.index(wanted) % ALIGNMENT == 0


def test_save_waits_while_both_slots_are_being_written(
    engine: CheckpointEngine, flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    engine.save(make_state(), {}, step=1, **FACTS)
    assert engine.wait(20)[0].committed
    flusher_supervisor.signal(signal.SIGSTOP)
    assert engine.save(make_state(2.0), {}, step=2, **FACTS)
    assert engine.save(make_state(3.0), {}, step=3, **FACTS)
    assert engine.in_flight == (2, 3)
    with pytest.raises(SaveError, match=r"no staging slot came free within 0 s\. Steps \[2, 3\]"):
        engine.save(make_state(), {}, step=4, timeout_s=0.05, **FACTS)
    assert engine.wait(0.05) == []
    flusher_supervisor.signal(signal.SIGCONT)
    assert engine.save(make_state(6.0), {}, step=6, timeout_s=20, **FACTS)
    assert [r.step for r in engine.wait(20)] == [2, 3, 6]
    assert not directory_of(tmp_path, 4).exists()
    assert read_keys(directory_of(tmp_path, 6)) == read_keys(directory_of(tmp_path, 1))


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_save_that_finishes_just_before_its_slot_is_reused_is_reported(
    engine: CheckpointEngine,
    flusher_supervisor: SlotHolder,
    monkeypatch: pytest.MonkeyPatch,
    is_snapshot: bool,
) -> None:
    """If it is not reported, the save counts as being written for ever."""
    engine.prepare(make_state())
    assert are_slots_mapped(engine, 20)
    stage = engine._stage
    assert stage is not None
    flusher_supervisor.signal(signal.SIGSTOP)
    for step in (1, 2):
        assert engine.save(make_state(), {}, step=step, **FACTS)
    choose = stage.free

    def choose_late() -> StagedSlot | None:
        flusher_supervisor.signal(signal.SIGCONT)
        wait_until(lambda: all(s.slot.state in FREE_STATES for s in stage.slots), "both", 20)
        return choose()

    monkeypatch.setattr(stage, "free", choose_late)
    if is_snapshot:
        assert engine.snapshot(make_state(3.0), {}, step=3, **FACTS)
    else:
        assert engine.save(make_state(3.0), {}, step=3, **FACTS)
    told = [result.step for result in engine.wait(20)]
    assert told == ([1, 2] if is_snapshot else [1, 2, 3])
    assert engine.in_flight == ()


def test_save_before_the_slots_are_allocated_is_complete(
    engine: CheckpointEngine, flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    for more in range(STARTS_MAX):
        state = {"model": {"weight": torch.arange(NUMBERS + more, dtype=torch.float32)}}
        engine.prepare(state)
        # The flusher allocates the memory; stop it before it is done.
        flusher_supervisor.process.send_signal(signal.SIGSTOP)
        if not are_slots_mapped(engine, 0.1):
            break
        flusher_supervisor.process.send_signal(signal.SIGCONT)
    else:
        pytest.fail("the slots were allocated before the flusher could be stopped")
    try:
        assert engine.save(state, {"step": 1}, step=1, **FACTS)
    finally:
        flusher_supervisor.process.send_signal(signal.SIGCONT)
    assert [result.committed for result in engine.wait(60)] == [True]
    assert are_slots_mapped(engine, 60)
    manifest = read_manifest(directory_of(tmp_path, 1))
    assert manifest is not None
    assert find_damage(directory_of(tmp_path, 1), manifest) == []
    loaded = {"model": {"weight": torch.zeros(NUMBERS + more)}}
    load_state(directory_of(tmp_path, 1), loaded, group=None)
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])


def test_changed_state_is_refused_by_name_until_it_is_planned_again(
    engine: CheckpointEngine, tmp_path: Path
) -> None:
    engine.save(make_state(), {}, step=1, **FACTS)
    changed = make_state()
    changed["model"]["weight"] = torch.zeros(4, 5)
    changed["model"]["new"] = torch.zeros(100_000)
    with pytest.raises(SaveError, match=r"model\.new: .*planned nothing.*model\.weight: "):
        engine.save(changed, {}, step=2, **FACTS)
    assert str(engine.changes(changed)).startswith("model.new: ")
    engine.prepare(changed)
    assert engine.changes(changed) is None
    assert engine.save(changed, {}, step=2, **FACTS)
    assert [(r.step, r.committed) for r in engine.wait(20)] == [(1, True), (2, True)]
    assert read_keys(directory_of(tmp_path, 2)) - read_keys(directory_of(tmp_path, 1)) == {
        "model.new"
    }
    assert engine.save(changed, {}, step=3, **FACTS)
    assert engine.wait(20)[0].committed
    wordy = {**changed, "group": {**changed["group"], "lr": "x" * 5000}}
    with pytest.raises(SaveError, match="call prepare"):
        engine.save(wordy, {}, step=4, **FACTS)
    assert engine.in_flight == ()
    engine.prepare(wordy)
    assert engine.save(wordy, {}, step=4, **FACTS)
    assert engine.wait(20)[0].committed


def test_unsupported_state_is_refused_with_advice(engine: CheckpointEngine) -> None:
    with pytest.raises(SaveError, match=r"model\.thing: a set cannot be saved as checkpoint state"):
        engine.save({"model": {"thing": {1}}}, {}, step=1, **FACTS)
    with pytest.raises(SaveError, match=r"two entries have the name .* when joined by dots"):
        engine.save({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, {}, step=1, **FACTS)
    with pytest.raises(SaveError, match="not JSON"):
        engine.save(make_state(), {"x": torch.zeros(1)}, step=1, **FACTS)
    with pytest.raises(SaveError, match="put large data into the state"):
        engine.save(make_state(), {"x": "y" * TRAIN_STATE_BYTES_MAX}, step=1, **FACTS)


def test_engine_reconnects_to_a_restarted_flusher(
    engine: CheckpointEngine, flusher_supervisor: SlotHolder, tmp_path: Path
) -> None:
    engine.save(make_state(), {}, step=1, **FACTS)
    assert engine.wait(20)[0].committed
    wait_until(
        lambda: len(flusher_supervisor.kept) == 2, "the flusher supervisor to have the slots"
    )
    flusher_supervisor.kill()
    assert engine.save(make_state(2.0), {}, step=2, **FACTS)
    flusher_supervisor.start()
    assert engine.wait(20)[0].committed
    assert engine.save(make_state(3.0), {}, step=3, **FACTS)
    assert engine.wait(20)[0].committed
    manifest = read_manifest(directory_of(tmp_path, 3))
    assert manifest is not None
    assert find_damage(directory_of(tmp_path, 3), manifest) == []


def test_metadata_build_failure_is_raised_and_cleared_by_prepare(
    engine: CheckpointEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise MemoryError("1.6 GB")

    state = make_state()
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.trainer.planning.metadata_pickle.find_places", run_out)
        engine.prepare(state)
        said = engine.wait_for_metadata()
    assert said is not None
    assert "could not be built in the background: MemoryError: 1.6 GB" in said
    assert engine.changes(state) == said
    assert engine.snapshot(state, {}, step=1, **FACTS) is False
    with pytest.raises(SaveError, match=r"MemoryError: 1\.6 GB\. If memory was short"):
        engine.save(state, {}, step=1, **FACTS)
    with pytest.raises(SaveError, match=r"no rank saves, because of rank 0: \.metadata could not"):
        engine.prepare(state)
    engine.prepare(state)
    assert engine.changes(state) is None
    for step in (1, 2):
        assert engine.save(state, {}, step=step, **FACTS)
    assert all(result.committed for result in engine.wait(20))
    contents = {(directory_of(tmp_path, step) / ".metadata").read_bytes() for step in (1, 2)}
    assert len(contents) == 1
    assert open_checkpoint(directory_of(tmp_path, 2)).metadata.storage_data


def test_save_waits_for_its_metadata_before_it_is_sealed(
    engine: CheckpointEngine,
    flusher_supervisor: SlotHolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Building metadata can take long; a kill in the meantime leaves nothing half-written."""
    may_go_on = threading.Event()

    def take_time(plan: GlobalPlan) -> RowPlaces:
        assert may_go_on.wait(RELEASE_S)
        return find_places(plan)

    monkeypatch.setattr("holdfast.trainer.planning.metadata_pickle.find_places", take_time)
    state = make_state()
    engine.prepare(state)
    assert engine.changes(state) is None
    assert engine.awaits_metadata
    assert engine.snapshot(state, {}, step=1, **FACTS) is False
    with ThreadPoolExecutor(1) as other:
        saved = other.submit(lambda: engine.save(state, {}, step=2, **FACTS))
        wait_until(lambda: len(flusher_supervisor.kept) == 2, "the slots")
        slots = [Slot(handle) for handle in flusher_supervisor.kept.values()]
        wait_until(lambda: SlotState.COPYING in [slot.state for slot in slots], "the copy")
        time.sleep(0.1)
        assert not saved.done()
        assert {slot.state for slot in slots} == {SlotState.COPYING, SlotState.EMPTY}
        assert not directory_of(tmp_path, 2).exists()
        may_go_on.set()
        assert saved.result(RELEASE_S)
    assert [result.committed for result in engine.wait(20)] == [True]
    assert not engine.awaits_metadata
    manifest = read_manifest(directory_of(tmp_path, 2))
    assert manifest is not None
    assert ".metadata" in {file.path for file in manifest.files}
    assert find_damage(directory_of(tmp_path, 2), manifest) == []
    loaded = {"model": make_state(9.0)["model"]}
    load_with_dcp(loaded, checkpoint_id=directory_of(tmp_path, 2))
    assert all(torch.equal(state["model"][key], loaded["model"][key]) for key in loaded["model"])
    for slot in slots:
        slot.close()


def test_missing_flusher_is_reported_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("holdfast-test-nobody", tmp_path)
    monkeypatch.setattr(
        "holdfast.trainer.staging.stage.FlusherConnection.connect.__defaults__", (0.05,)
    )
    with pytest.raises(SaveError, match="no flusher answered at holdfast-test-nobody"):
        engine.save(make_state(), {}, step=1, **FACTS)
    engine.close()


def test_key_and_shape_mismatches_are_reported_before_loading(
    engine: CheckpointEngine, tmp_path: Path
) -> None:
    engine.save(make_state(), {}, step=1, **FACTS)
    assert engine.wait(20)[0].committed
    wanted = make_state(7.0)
    del wanted["model"]["half"]
    wanted["model"]["more"] = torch.zeros(2)
    with pytest.raises(KeyMismatchError) as mismatch:
        load_state(directory_of(tmp_path, 1), wanted, group=None)
    assert mismatch.value.missing == ("model.more",)
    assert mismatch.value.extra == ("model.half",)
    assert wanted["model"]["weight"][0, 0] == 7
    report = load_state(directory_of(tmp_path, 1), wanted, group=None, strict=False)
    assert (report.missing, report.extra) == (("model.more",), ("model.half",))
    assert wanted["model"]["weight"][0, 0] == 1
    wanted["model"]["weight"] = torch.zeros(5, 5)
    with pytest.raises(KeyMismatchError, match=r"model\.weight: wanted \(5, 5\), saved \(3, 5\)"):
        load_state(directory_of(tmp_path, 1), wanted, group=None, strict=False)


def test_metadata_that_differs_from_the_manifest_is_refused(
    engine: CheckpointEngine, tmp_path: Path
) -> None:
    engine.save(make_state(), {}, step=1, **FACTS)
    assert engine.wait(20)[0].committed
    path = directory_of(tmp_path, 1) / ".metadata"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DamagedCheckpointError, match="differs from the committed file"):
        load_state(directory_of(tmp_path, 1), make_state(), group=None)


def test_memory_shortage_is_computed_for_all_ranks_of_a_node() -> None:
    gib = 1 << 30
    assert find_shortage(0, [3 * gib, 3 * gib], 12 * gib) is None
    problem = find_shortage(0, [3 * gib] * 3, 13 * gib)
    assert problem is not None
    assert "node 0: " in problem
    assert "need 18.00 GiB, but 13.00 GiB are free" in problem


class PickyPlanner(HalfPlanner):
    """Resolves the group's learning rate to `worse`, if set."""

    worse: Any = None

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn != "group.lr" or self.worse is None:
            return super().resolve_data(write_item)
        stream = io.BytesIO()
        torch.save(self.worse, stream)
        return stream


def test_custom_planner_plans_every_save(flusher_supervisor: SlotHolder, tmp_path: Path) -> None:
    planner = PickyPlanner()
    engine = make_engine(flusher_supervisor.name, tmp_path, planner)
    state = make_state()
    for step in (1, 2, 3):
        state = make_state(float(step))
        if step == 3:
            state["model"]["new"] = torch.ones(100_000)
        assert engine.changes(state) is None
        assert engine.save(state, {}, step=step, **FACTS)
        assert engine.wait(20)[0].committed
    loaded = make_state(9.0)
    loaded["model"] = {k: torch.zeros_like(v).half() for k, v in state["model"].items()}
    load_with_dcp(loaded, checkpoint_id=directory_of(tmp_path, 3), no_dist=True)
    assert loaded["group"] == state["group"]
    for key, value in loaded["model"].items():
        assert torch.equal(value, state["model"][key].half()), key
    assert not engine.snapshot(state, {}, step=4, **FACTS)
    planner.worse = Path("code")
    with pytest.raises(SaveError, match=r"group\.lr: .* cannot be read without running code"):
        engine.save(state, {}, step=4, **FACTS)
    planner.worse = {"a": "mapping"}
    with pytest.raises(SaveError, match=r"group\.lr: the planner resolves it to a dict"):
        engine.save(state, {}, step=4, **FACTS)
    assert not directory_of(tmp_path, 4).exists()
    engine.close()
