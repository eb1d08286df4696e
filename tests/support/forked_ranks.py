"""Real ranks that are forked from a process with torch imported, and connected by gloo."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

FAILED = 1
POLL_S = 0.01


def run_ranks(world_size: int, store: Path, act: Callable[[], None]) -> None:
    """Run `act` on `world_size` ranks to its end; `store` is a new file for their rendezvous.

    Raises `RuntimeError` when one failed; what it raised is on standard error by then, and the
    others are ended.
    """
    pids = [_fork(rank, world_size, store, act) for rank in range(world_size)]
    failed = None
    left = dict(enumerate(pids))
    while left:
        # Wait only for the ranks: this process may have other children, such as loader workers.
        ended = {
            rank: status
            for rank, pid in left.items()
            for found, status in [os.waitpid(pid, os.WNOHANG)]
            if found
        }
        for rank, status in ended.items():
            del left[rank]
            if status and failed is None:
                failed = rank
                for other in left.values():
                    _end(other)
        if not ended:
            time.sleep(POLL_S)
    if failed is not None:
        raise RuntimeError(f"rank {failed} of {world_size} failed")


def _fork(rank: int, world_size: int, store: Path, act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = FAILED
    # The threads of OpenMP, which the parent may have started, do not exist in a forked process.
    torch.set_num_threads(1)
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        act()
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        # The child ends here in any case; its parent raises.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        print(f"{pid} had ended already", file=sys.stderr)
