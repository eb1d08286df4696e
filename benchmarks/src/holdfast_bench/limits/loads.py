"""Loads in place by Holdfast and by stock DCP, with the bytes that the kernel read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from holdfast.trainer.loading.reader import load_state
from holdfast_bench.limits.ranks import Program, Trained


def load_cold(program: Program, trained: Trained, directory: Path) -> tuple[float, float]:
    """Load with Holdfast. Return (seconds of the slowest rank, bytes that all ranks read)."""
    state = trained.state()
    return _measured(program, lambda: load_state(directory, state, group=dist.group.WORLD))


def load_stock(program: Program, trained: Trained, directory: Path) -> tuple[float, float]:
    """Load with stock DCP. Return (seconds of the slowest rank, bytes that all ranks read)."""
    state = trained.state()
    return _measured(program, lambda: load_with_dcp(state, checkpoint_id=directory))


def _measured(program: Program, act: Callable[[], object]) -> tuple[float, float]:
    before = bytes_read()
    program.meet()
    began = time.perf_counter()
    act()
    seconds = program.slowest(time.perf_counter() - began)
    return seconds, program.together(bytes_read() - before)


def bytes_read() -> int:
    """Return the bytes that this process got from read calls, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])
