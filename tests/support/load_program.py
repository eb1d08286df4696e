"""Ranks that save known tensors and load them at other world sizes; each load reports its reads.

    python -m tests.support.load_program save|load WORLD_SIZE FOLDER FLUSHER CHECKPOINT

Values depend only on the key, so that every load can be checked without the saved state.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.checkpoint_program import make_identity
from tests.support.forked_ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError, KeyMismatchError
from holdfast.trainer.loading.reader import LoadReport, load_state
from holdfast.trainer.saving.engine import CheckpointEngine

# Row counts that no number of ranks divides, and row sizes that are no powers of two.
SHAPES = {f"w{index}": (1001, 1036 + 4 * index) for index in range(8)} | {"bias": (1001,)}
GROUP: dict[str, Any] = {"lr": 0.25, "betas": (0.9, 0.95), "foreach": None}
SAME, RESHARDED = 1.02, 1.05
# Prepare, request, exchange shared parts, agree on the result.
MEETINGS_MAX = 4

Lay = Callable[[torch.Tensor], torch.Tensor]


def value_of(key: str) -> torch.Tensor:
    """The whole tensor that belongs to `key`."""
    torch.manual_seed(len(key) * 1000 + sum(map(ord, key)))
    return torch.randn(SHAPES[key])


def make_state(lay: Lay, *, filled: bool, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The state in layout `lay`, with its values or with noise, and some small entries."""
    model = {}
    for key, shape in SHAPES.items():
        whole = value_of(key) if filled else torch.full(shape, 7.0)
        model[key] = lay(whole.to(dtype))
    steps = {f"s{index}": torch.tensor(float(index) if filled else -1.0) for index in range(20)}
    groups = dict(GROUP) if filled else dict.fromkeys(GROUP, 0)
    return {"model": model, "optimizer": {"steps": steps, "groups": groups}}


def check(state: dict[str, Any]) -> None:
    """Every value is bit-identical, or rounded to the type that it was loaded as."""
    for key, found in state["model"].items():
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert torch.equal(whole, value_of(key).to(whole.dtype)), key
    for index in range(20):
        assert state["optimizer"]["steps"][f"s{index}"].item() == index
    assert state["optimizer"]["groups"] == GROUP


def bytes_read() -> int:
    """Bytes that this process has read from storage and the page cache."""
    (line,) = [one for one in Path("/proc/self/io").read_text().splitlines() if "rchar" in one]
    return int(line.split()[1])


def count_meetings(patched: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the names of all collectives called from now on."""
    called: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        act = getattr(dist, name)

        def count(*args: Any, **more: Any) -> Any:
            called.append(name)
            return act(*args, **more)

        return count

    for name in ("all_gather_object", "barrier"):
        patched.setattr(dist, name, counted(name))
    return called


def load(
    checkpoint: Path, state: dict[str, Any], group: dist.ProcessGroup, ratio: float, **choice: Any
) -> LoadReport:
    """Load, and compare the bytes read by all ranks with the bytes needed, counted twice."""
    dist.barrier()
    before = bytes_read()
    with pytest.MonkeyPatch.context() as patched:
        meetings = count_meetings(patched)
        report = load_state(checkpoint, state, group=group, **choice)
    assert len(meetings) <= MEETINGS_MAX, meetings
    read = torch.tensor(float(bytes_read() - before), dtype=torch.float64)
    dist.all_reduce(read)
    assert report.bytes_read <= ratio * report.bytes_unique, report
    assert read.item() <= ratio * report.bytes_unique, (read, report)
    if dist.get_rank() == 0:
        told = {"read": read.item(), "unique": report.bytes_unique, "ratio_max": ratio}
        print(json.dumps(told), flush=True)
    return report


def save(engine: CheckpointEngine, mesh: DeviceMesh) -> None:
    state = make_state(lambda t: distribute_tensor(t, mesh, [Shard(0)]), filled=True)
    assert engine.save(state, {"epoch": 1}, step=1, reason="interval", parent=None)
    assert engine.wait(120)[0].committed


def load_all(checkpoint: Path, world_size: int, group: dist.ProcessGroup) -> None:
    """Load every layout for this number of ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    unique = sum(value_of(key).nbytes for key in SHAPES)
    for ratio, placement in (
        (SAME if world_size == 2 else RESHARDED, Shard(0)),
        (RESHARDED, Shard(-1)),
        (RESHARDED, Replicate()),
    ):
        at = placement

        def lay(whole: torch.Tensor, at: Any = at) -> torch.Tensor:
            dim = Shard(whole.dim() - 1) if at == Shard(-1) else at
            return distribute_tensor(whole, mesh, [dim])

        state = make_state(lay, filled=False)
        report = load(checkpoint, state, group, ratio)
        check(state)
        assert unique <= report.bytes_unique <= 1.01 * unique, report
        assert (report.missing, report.extra, report.converted) == ((), (), ())
    if world_size == 4:
        grid = init_device_mesh("cpu", (2, 2))
        state = make_state(
            lambda t: (
                distribute_tensor(t, grid, [Shard(0), Shard(t.dim() - 1)][: grid.ndim])
                if t.dim() > 1
                else distribute_tensor(t, grid, [Replicate(), Shard(0)])
            ),
            filled=False,
        )
        load(checkpoint, state, group, RESHARDED)
        check(state)
    state = make_state(lambda t: t.t().contiguous().t(), filled=False, dtype=torch.bfloat16)
    report = load(checkpoint, state, group, RESHARDED)
    check(state)
    assert len(report.converted) == len(SHAPES)
    assert "model.w0: float32 to bfloat16" in report.converted


def load_some(checkpoint: Path, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Partial loads, renamed keys, and errors that are raised before anything is read."""
    state = make_state(lambda t: distribute_tensor(t, mesh, [Shard(0)]), filled=False)
    state["model"]["fresh"] = torch.ones(3)
    state["model"]["moved"] = {"w1": state["model"].pop("w1")}
    with pytest.raises(KeyMismatchError) as refused:
        load_state(checkpoint, state, group=group)
    assert refused.value.missing == ("model.fresh", "model.moved.w1")
    assert refused.value.extra == ("model.w1",)
    report = load_state(
        checkpoint,
        state,
        group=group,
        strict=False,
        exclude=["optimizer", "model.w2"],
        rename={"model.w1": "model.moved.w1"},
    )
    assert report.missing == ("model.fresh",)
    assert report.renamed == ("model.w1 to model.moved.w1",)
    assert {"model.w2", "optimizer.groups.lr"} < set(report.excluded)
    assert torch.equal(state["model"]["moved"]["w1"].full_tensor(), value_of("w1"))
    assert torch.equal(state["model"]["w0"].full_tensor(), value_of("w0"))
    assert torch.equal(state["model"]["fresh"], torch.ones(3))
    assert (state["model"]["w2"].to_local() == 7).all()
    assert state["optimizer"]["groups"]["lr"] == 0


def load_damaged(checkpoint: Path, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """A flipped bit in one rank's part is an error on every rank and names file and block."""
    state = make_state(lambda t: distribute_tensor(t, mesh, [Shard(0)]), filled=False)
    with pytest.raises(DamagedCheckpointError) as damaged:
        load_state(checkpoint, state, group=group)
    (line,) = damaged.value.damaged
    assert line.startswith("__1_0.distcp: bytes 4194304 to 8388607: checksum "), line


def load_refused(checkpoint: Path, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """A failure on one rank is an error on both, and neither waits for the other."""
    for refused, words in (
        (torch.empty(1001, device="meta"), "it is on the meta device"),
        # Detected by a thread just before it copies the first bytes.
        (torch.zeros(1).expand(1001), "refers to a single memory location"),
    ):
        state = make_state(lambda t: distribute_tensor(t, mesh, [Shard(0)]), filled=False)
        if dist.get_rank() == 1:
            state["model"]["bias"] = refused
        with pytest.raises(CheckpointError, match=words):
            load_state(checkpoint, state, group=group)


def load_apart(checkpoint: Path, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """If one rank cannot open the other's memory, each reads everything that it needs."""
    act = os.open

    def refuse(path: Any, *args: Any, **more: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        return act(path, *args, **more)

    state = make_state(lambda t: distribute_tensor(t, mesh, [Replicate()]), filled=False)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(os, "open", refuse)
        load(checkpoint, state, group, 2 * SAME)
    check(state)


def main() -> None:
    act, world_size, folder, flusher, checkpoint = sys.argv[1:]
    store = Path(folder) / f"store-{act}-{world_size}"
    work = partial(run_rank, act, Path(folder), flusher, Path(checkpoint))
    run_ranks(int(world_size), store, work)


def run_rank(act: str, folder: Path, flusher: str, checkpoint: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (world_size,))
    if act == "save":
        engine = CheckpointEngine(
            flusher=flusher,
            run=RunPaths(folder / "r"),
            identity=make_identity(rank, world_size),
            group=group,
        )
        save(engine, mesh)
        engine.close()
    else:
        load_all(checkpoint, world_size, group)
    if act == "load" and world_size == 2:
        load_some(checkpoint, mesh, group)
        load_apart(checkpoint, mesh, group)
        load_refused(checkpoint, mesh, group)
        load_damaged(folder / "damaged" / checkpoint.name, mesh, group)


if __name__ == "__main__":
    main()
