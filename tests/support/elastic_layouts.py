"""One small model, distributed over ranks in every layout of the elastic test matrix.

A layout distributes the whole model over a mesh of all ranks. The sizes are chosen so that some
dimension always splits unevenly: 10 words, 13 outputs, 6 experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, HIDDEN, OUTPUTS, EXPERTS, LAYERS = 10, 12, 24, 13, 6, 4


class Experts(nn.Module):
    """A weight for each expert, shape (experts, width, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.experts = Experts()


class Net(nn.Module):
    """Maps words to outputs; layers have names, so that a stage keeps the full model's names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(LAYERS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("seen", torch.full((3,), float(seed)))


@dataclass(frozen=True)
class Layout:
    """`sizes` of the mesh by the number of ranks; `lay` converts the whole model to a rank's."""

    names: tuple[str, ...]
    sizes: dict[int, tuple[int, ...]]
    lay: Callable[[Net, DeviceMesh], nn.Module]

    def make(self, world_size: int, seed: int) -> tuple[nn.Module, DeviceMesh]:
        """This rank's model, initialised from `seed`, and the mesh of all ranks."""
        mesh = init_device_mesh("cpu", self.sizes[world_size], mesh_dim_names=self.names)
        return self.lay(Net(seed), mesh), mesh


def _plain(net: Net, _: DeviceMesh) -> nn.Module:
    return net


def _ddp(net: Net, _: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(net)


def _fsdp2(net: Net, mesh: DeviceMesh) -> Net:
    for layer in net.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def _tp(net: Net, mesh: DeviceMesh, *, uneven: bool = True) -> Net:
    plan: dict[str, Any] = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    if uneven:
        plan |= {"embed": RowwiseParallel(), "head": ColwiseParallel()}
    parallelize_module(net, mesh["tp"], plan)
    return net


def _ep(net: Net, mesh: DeviceMesh) -> Net:
    for module in net.modules():
        if isinstance(module, Experts):
            sharded = distribute_tensor(module.weight.detach(), mesh["ep"], [Shard(0)])
            module.weight = nn.Parameter(sharded)
    return net


def _stage(net: Net, mesh: DeviceMesh) -> Net:
    """The rank's stage: an equal share of the layers, and the ends at the first and last stage."""
    stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    for index in range(LAYERS):
        if index * stages // LAYERS != stage:
            del net.layers[str(index)]
    if stage > 0:
        del net.embed
    if stage < stages - 1:
        del net.norm, net.head, net.seen
    return net


def _stage_fsdp2(net: Net, mesh: DeviceMesh) -> Net:
    return _fsdp2(_stage(net, mesh), mesh["dp"])


def _stage_fsdp2_tp(net: Net, mesh: DeviceMesh) -> Net:
    return _fsdp2(_tp(_stage(net, mesh), mesh, uneven=False), mesh["dp"])


LAYOUTS: dict[str, Layout] = {
    "plain": Layout(("dp",), {1: (1,)}, _plain),
    "ddp": Layout(("dp",), {2: (2,), 4: (4,), 8: (8,)}, _ddp),
    "fsdp2": Layout(("dp",), {1: (1,), 2: (2,), 4: (4,), 8: (8,)}, _fsdp2),
    "hsdp": Layout(("replicate", "shard"), {2: (2, 1), 4: (2, 2), 8: (2, 4)}, _fsdp2),
    "tp": Layout(("tp",), {2: (2,), 4: (4,), 8: (8,)}, _tp),
    "fsdp2_tp": Layout(
        ("dp", "tp"),
        {4: (2, 2), 8: (4, 2)},
        lambda net, mesh: _fsdp2(_tp(net, mesh, uneven=False), mesh["dp"]),
    ),
    "hsdp_tp": Layout(
        ("replicate", "shard", "tp"),
        {8: (2, 2, 2)},
        lambda net, mesh: _fsdp2(_tp(net, mesh, uneven=False), mesh["replicate", "shard"]),
    ),
    "ep": Layout(("ep",), {2: (2,), 4: (4,), 8: (8,)}, _ep),
    "fsdp2_ep": Layout(
        ("dp", "ep"),
        {4: (2, 2), 8: (4, 2)},
        lambda net, mesh: _fsdp2(_ep(net, mesh), mesh["dp"]),
    ),
    "pp4": Layout(("pp", "dp"), {4: (4, 1), 8: (4, 2)}, _stage_fsdp2),
    "pp2": Layout(("pp", "dp"), {2: (2, 1), 4: (2, 2), 8: (2, 4)}, _stage_fsdp2),
    "pp2_tp": Layout(("pp", "dp", "tp"), {8: (2, 2, 2)}, _stage_fsdp2_tp),
}


def layouts_of(world_size: int) -> dict[str, Layout]:
    """The layouts for this number of ranks, in order."""
    return {name: each for name, each in LAYOUTS.items() if world_size in each.sizes}
