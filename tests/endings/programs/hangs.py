"""A program whose ranks hang in a given way: `hangs.py WAY FOLDER`. Each way is one function.

A thread of each rank writes its flight record into FOLDER. With NCCL, PyTorch has such a thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

WAIT_S = 4.0
LONG_S = 600.0
WAYS: dict[str, Callable[[int], None]] = {}


def way(act: Callable[[int], None]) -> Callable[[int], None]:
    """Register a way to hang under its function name. Every rank calls it with its number."""
    WAYS[act.__name__] = act
    return act


def train(*, steps: int = 2) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(4))


def load_batch() -> None:
    time.sleep(LONG_S)


@way
def asleep(rank: int) -> None:
    train()
    if rank == 2:
        load_batch()
    dist.all_reduce(torch.ones(4))


@way
def asleep_from_the_start(rank: int) -> None:
    if rank == 1:
        load_batch()
    dist.all_reduce(torch.ones(4))


@way
def stopped(rank: int) -> None:
    train()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))


@way
def skipped(rank: int) -> None:
    train()
    if rank != 1:
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    time.sleep(LONG_S)


@way
def other_shape(rank: int) -> None:
    train()
    dist.all_reduce(torch.ones(5 if rank == 1 else 4))
    time.sleep(LONG_S)


@way
def opposite_orders(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(4), group=group)
    time.sleep(LONG_S)


@way
def member_asleep(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    train()
    if rank == 3:
        load_batch()
    dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
    dist.all_reduce(torch.ones(4))


@way
def no_send(rank: int) -> None:
    train()
    if rank == 0:
        dist.recv(torch.ones(4), 1)
    load_batch()


def keep_record(folder: Path, rank: int) -> None:
    """Write the record under its name only when it is complete."""
    time.sleep(WAIT_S)
    part = folder / f"part-{rank}"
    part.write_bytes(_dump_fr_trace(True, True, False))
    part.rename(folder / f"gloo-rank-{rank:05d}")


def main() -> None:
    name, folder = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONG_S))
    rank = dist.get_rank()
    threading.Thread(target=keep_record, args=(Path(folder), rank), daemon=True).start()
    WAYS[name](rank)


if __name__ == "__main__":
    main()
