"""Writes the `.metadata` of the torch and the Python that run it: `write.py FOLDER`.

Its files are read by `tests/unit/test_torch_metadata.py`. Each was made in an environment that has
only that torch and NumPy. The file of Python 3.11.2 was renamed: this Python, which Debian 12 has,
pickles enums in another way. For a new minor version of torch or Python, add a file and a line to
`FILES` there.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def state() -> dict[str, Any]:
    """A state with each kind of entry: dense, transposed and sharded tensors, values, lists."""
    mesh = init_device_mesh("cpu", (1,))
    shard: Any = torch.arange(6.0).view(2, 3)
    # The attributes of torch's `CheckpointableTensor`. Before torch 2.14 they mean nothing.
    shard.global_shape, shard.global_offsets = (4, 3), ((2, 0),)
    shard.local_offsets, shard.local_sizes = ((0, 0),), ((2, 3),)
    return {
        "model": {
            "weight": torch.zeros(3, 4),
            "transposed": torch.zeros(3, 4, dtype=torch.bfloat16).t(),
            "frozen": torch.nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False),
            "scalar": torch.tensor(1),
            "empty": torch.zeros(0, 3, dtype=torch.bool),
            "sharded": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]),
        },
        "groups": [{"lr": 0.1, "momentum": torch.zeros(1)}],
        "step": 7,
        "shard": shard,
    }


def main(folder: Path) -> None:
    """Save with stock DCP into a directory with a short name, and keep its `.metadata`."""
    minor = ".".join(torch.__version__.split(".")[:2])
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = folder.resolve() / f"torch-{minor}-python-{python}.metadata"
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        save(state(), checkpoint_id=Path("checkpoint"))
        dist.destroy_process_group()
        shutil.copyfile("checkpoint/.metadata", target)
        os.chdir("/")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
