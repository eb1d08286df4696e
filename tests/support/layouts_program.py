"""Saves and loads states of generated layouts on forked ranks, with Holdfast and stock DCP.

    python -m tests.support.layouts_program CASES FOLDER FLUSHER

CASES is a JSON file: a list of states, each {key: {shape, dtype, saved, loaded}}, where `saved` and
`loaded` are layouts: {kind, mesh, placements}. Every state goes through both writers and both
readers. The first rank on which bytes differ, or on which Holdfast refuses what stock loads, ends
the program by an error.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from tests.support.checkpoint_program import make_identity
from tests.support.forked_ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.planning.layout import local_part
from holdfast.trainer.saving.engine import CheckpointEngine

RANKS: Final = 4
MESHES: Final[dict[str, Any]] = {
    "line": [0, 1, 2, 3],
    "square": [[0, 1], [2, 3]],
    "turned": [[0, 2], [1, 3]],
    "pair": [0, 1],
    "others": [3, 1],
}
State = dict[str, Any]
Meshes = dict[str, DeviceMesh]


def values(key: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Bytes that differ for every position of every key, as far as the type allows."""
    count, begin = math.prod(shape), sum(key.encode()) % 100
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == begin % 3).view(shape)
    content = (torch.arange(begin, begin + count * dtype.itemsize) * 7 % 251).to(torch.uint8)
    return content.view(dtype).view(shape)


def build(case: dict[str, Any], which: str, meshes: Meshes, *, blank: bool) -> State:
    """This rank's state; with `blank` every byte is zero."""
    state: State = {}
    for key, spec in case.items():
        whole = values(key, spec["shape"], getattr(torch, spec["dtype"]))
        if blank:
            whole = torch.zeros(whole.shape, dtype=torch.uint8).to(whole.dtype)
        state[key] = lay_out(whole, spec[which], meshes)
    return state


def lay_out(whole: torch.Tensor, layout: dict[str, Any], meshes: Meshes) -> torch.Tensor:
    if layout["kind"] == "turned":
        order = list(reversed(range(whole.dim())))
        return whole.permute(order).contiguous().permute(order)
    if layout["kind"] == "spread":
        wide = torch.zeros((*whole.shape, 2), dtype=torch.uint8).to(whole.dtype)
        wide[..., 0].copy_(whole)
        return wide[..., 0]
    if layout["kind"] == "plain":
        return whole.clone()
    mesh = meshes[layout["mesh"]]
    placements: list[Placement] = [
        Replicate() if one is None else Shard(one) for one in layout["placements"][: mesh.ndim]
    ]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def octets(value: torch.Tensor) -> list[int]:
    local = local_part(value).contiguous().reshape(-1)
    return list(local.as_strided((local.numel(),), (1,)).view(torch.uint8).tolist())


def assert_loaded(state: State, expected: State, what: str) -> None:
    for key, value in state.items():
        assert octets(value) == octets(expected[key]), f"{what}: {key} on rank {dist.get_rank()}"


def check(case: dict[str, Any], number: int, engine: CheckpointEngine, folder: Path) -> None:
    """Both writers, both readers."""
    meshes = MADE
    saved = build(case, "saved", meshes, blank=False)
    expected = build(case, "loaded", meshes, blank=False)
    engine.prepare(saved)
    assert engine.save(saved, {}, step=number + 1, reason="interval", parent=None)
    (result,) = engine.wait(60)
    assert result.committed, result.error
    ours = RunPaths(folder / "r").checkpoint(result.checkpoint)
    dist.barrier()
    places = {"ours": ours}
    try:
        save_with_dcp(saved, checkpoint_id=folder / f"stock-{number}")
        places["stock's"] = folder / f"stock-{number}"
    except CheckpointException as error:
        print(f"stock DCP does not save {case}: {error}", flush=True)
    for whose, place in places.items():
        by_stock, by_us = (build(case, "loaded", meshes, blank=True) for _ in range(2))
        stock_refuses = we_refuse = ""
        try:
            load_with_dcp(by_stock, checkpoint_id=place)
        except CheckpointException as error:
            stock_refuses = str(error)
        try:
            load_state(place, by_us, group=dist.group.WORLD)
        except HoldfastError as error:
            we_refuse = str(error)
        assert not (stock_refuses and whose == "ours"), f"stock refuses ours: {stock_refuses}"
        assert stock_refuses or not we_refuse, f"stock loads {whose}, not Holdfast: {we_refuse}"
        assert not we_refuse or any(key in we_refuse for key in case), f"no key: {we_refuse}"
        if not stock_refuses:
            assert_loaded(by_stock, expected, f"{whose} by stock")
        if not we_refuse:
            assert_loaded(by_us, expected, f"{whose} by Holdfast")
        dist.barrier()


MADE: Meshes = {}


def act(cases: list[dict[str, Any]], folder: Path, flusher: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    MADE.update({name: DeviceMesh("cpu", ranks) for name, ranks in MESHES.items()})
    engine = CheckpointEngine(
        flusher=flusher,
        run=RunPaths(folder / "r"),
        identity=make_identity(dist.get_rank(), dist.get_world_size()),
        group=dist.new_group(backend="gloo"),
    )
    for number, case in enumerate(cases):
        try:
            check(case, number, engine, folder)
        except BaseException:
            print(f"case {number}: {json.dumps(case)}", file=sys.stderr, flush=True)
            raise
    engine.close()


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    run_ranks(RANKS, folder / "store", partial(act, cases, folder, sys.argv[3]))


if __name__ == "__main__":
    main()
