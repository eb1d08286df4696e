"""Four ranks on two simulated nodes load a checkpoint beside process groups of the program.

python -m tests.support.node_groups_program FOLDER
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.forked_ranks import run_ranks
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.trainer.loading import node
from holdfast.trainer.loading.reader import load_state

RANKS, NODES = 4, 2
SHAPE = (300, 1000)


def main(folder: Path) -> None:
    run_ranks(RANKS, folder / "store", partial(load, folder / "saved"))


def load(directory: Path) -> None:
    rank = dist.get_rank()
    expected = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    if rank == 0:
        save({"weight": expected}, checkpoint_id=directory, no_dist=True)
    dist.barrier()
    home = str(rank * NODES // RANKS)
    node.find_home = lambda: (home, home, home)
    # Ranks of a program may have made different groups before: each of these is one rank's
    # own.
    for _ in range(rank):
        dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    group = dist.new_group(backend="gloo")
    state = {"weight": torch.zeros(SHAPE)}
    report = load_state(directory, state, group=group)
    assert torch.equal(state["weight"], expected)
    # The ranks of each node together read every byte once.
    assert report.bytes_unique == NODES * expected.nbytes, report
    print(f"restored {report.restored}, all ranks of its node share", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
