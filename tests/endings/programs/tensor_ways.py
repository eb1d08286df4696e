"""Ways to fail that need torch: collectives, tensors, data loaders. Every rank calls the way."""

from __future__ import annotations

import ctypes
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset

MIB = 1 << 20
SHORT_S = 3.0
LONG_S = 120.0
TENSOR_WAYS: dict[str, Callable[[], object]] = {}


def way(act: Callable[[], object]) -> Callable[[], object]:
    """Register a way to fail under its function name."""
    TENSOR_WAYS[act.__name__] = act
    return act


def join(timeout_s: float = LONG_S) -> int:
    """Join the process group; returns this process's rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    dist.barrier()
    return dist.get_rank()


@way
def rank_killed() -> None:
    if join() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


@way
def error_on_one_rank() -> None:
    if join() == 1:
        raise ValueError("expected 4 classes, got 5")
    dist.all_reduce(torch.ones(4))


@way
def peer_left() -> None:
    if join() == 1:
        sys.stdout.flush()
        os._exit(0)
    dist.all_reduce(torch.ones(4))


@way
def collective_timeout() -> None:
    if join(SHORT_S) == 1:
        time.sleep(LONG_S)
    dist.all_reduce(torch.ones(4))


@way
def barrier_timeout() -> None:
    if join() == 1:
        time.sleep(LONG_S)
    dist.monitored_barrier(timeout=timedelta(seconds=SHORT_S))


@way
def rendezvous_timeout() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(LONG_S)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SHORT_S))


@way
def store_unreachable() -> None:
    if os.environ["RANK"] == "1":
        TCPStore("127.0.0.1", 9, timeout=timedelta(seconds=SHORT_S))
    time.sleep(LONG_S)


@way
def store_port_taken() -> None:
    if os.environ["RANK"] == "1":
        first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)
    time.sleep(LONG_S)


@way
def shape_mismatch() -> None:
    size = 8 if join() == 1 else 4
    dist.all_reduce(torch.ones(size))


@way
def non_finite_gradients() -> None:
    if join() == 1:
        weight = torch.nn.Parameter(torch.ones(2))
        (weight * float("inf")).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    dist.barrier()


@way
def anomaly() -> None:
    with torch.autograd.detect_anomaly():
        weight = torch.zeros(2, requires_grad=True)
        (torch.sqrt(weight) * 0).sum().backward()  # type: ignore[no-untyped-call]


@way
def tensor_too_large() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4096 * MIB, 4096 * MIB))
    torch.ones(8192 * MIB, dtype=torch.uint8)


@way
def save_on_full_disk() -> None:
    if join() == 1:
        torch.save(torch.ones(4 * MIB), os.path.join(os.environ["ENDING_FULL_DIRECTORY"], "m.pt"))
    dist.barrier()


@way
def damaged_checkpoint() -> None:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        pathlib.Path(file.name).write_bytes(b"\x80\x02garbage" * 64)
        torch.load(file.name)


class Samples(Dataset[int]):
    """A dataset whose third sample fails in the given way."""

    def __init__(self, fail: Callable[[], object]) -> None:
        self._fail = fail

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 2:
            # The rank has taken the samples before it. Otherwise it may fail while it takes one.
            time.sleep(0.5)
            self._fail()
        return index


def load(fail: Callable[[], object]) -> None:
    """Rank 1 loads samples in a worker process, which fails."""
    if join() == 1:
        for _ in DataLoader(Samples(fail), batch_size=1, num_workers=1):
            time.sleep(0.01)
    dist.barrier()


@way
def loader_killed() -> None:
    load(lambda: os.kill(os.getpid(), signal.SIGKILL))


@way
def loader_segmentation_fault() -> None:
    load(lambda: ctypes.string_at(0))


@way
def loader_error() -> None:
    load(lambda: dict[str, int]()["image"])


@way
def loader_oom() -> None:
    load(lambda: [b"x" * MIB for _ in range(4096)])
