"""The base of all rank programs: operations that begin together and count the slowest rank.

`launch` starts a program under torchrun with its settings as one JSON argument. Rank 0 writes the
results as JSON into the file that the settings name. All times are in seconds.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

# Parameters and AdamW's two moments, all of them 32-bit floats.
BYTES_PER_PARAMETER: Final = 3 * 4
WIDTH: Final = 1024
SMALL_WIDTH: Final = 256
# A smaller state uses narrower layers, so that it still has many of them.
SMALL_STATE_BYTES: Final = 64_000_000
ALIGNMENT: Final = 64

Seconds = dict[str, list[float]]
State = dict[str, Any]


class Program:
    """One rank of a benchmark program: its settings, its process group and its results."""

    def __init__(self, device: str = "cpu") -> None:
        self.settings: dict[str, Any] = json.loads(sys.argv[1])
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        # The benchmark's own group, because stock DCP saves over the default group meanwhile.
        self._group = dist.new_group(backend="gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.directory = Path(self.settings["directory"])
        self.seconds: Seconds = {}
        self.facts: dict[str, Any] = {}

    def measure(self, act: Callable[[], object]) -> float:
        """Return the slowest rank's seconds for `act`, which all ranks begin together."""
        self.meet()
        began = time.perf_counter()
        act()
        return self.slowest(time.perf_counter() - began)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        dist.barrier(group=self._group)

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' values."""
        return self._reduced(seconds, dist.ReduceOp.MAX)

    def together(self, count: float) -> float:
        """Return the sum of all ranks' values."""
        return self._reduced(count, dist.ReduceOp.SUM)

    def note(self, **found: float) -> None:
        """Add one value to each named series."""
        for name, value in found.items():
            self.seconds.setdefault(name, []).append(value)

    def is_time_left(self) -> bool:
        """Return False once this program's time is used up. The result is equal on all ranks."""
        return self.slowest(time.time()) < float(self.settings["end_by"])

    def finish(self) -> None:
        """Write the results and destroy the process group."""
        if self.rank == 0:
            found = {"seconds": self.seconds, "facts": self.facts}
            out = Path(self.settings["out"])
            temporary = out.with_suffix(".tmp")
            temporary.write_text(json.dumps(found))
            os.replace(temporary, out)
        dist.destroy_process_group()

    def _reduced(self, value: float, how: Any) -> float:
        result = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(result, op=how, group=self._group)
        return float(result)


class Trained:
    """A sharded stack of square layers with AdamW, with about `state_bytes` of training state."""

    def __init__(self, state_bytes: int, device: str = "cpu") -> None:
        width = WIDTH if state_bytes >= SMALL_STATE_BYTES else SMALL_WIDTH
        count = max(2, round(state_bytes / (width * width * BYTES_PER_PARAMETER)))
        layers = [torch.nn.Linear(width, width, bias=False, device=device) for _ in range(count)]
        self.model = torch.nn.Sequential(*layers)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.update()

    def update(self) -> None:
        """Take one optimizer step, so that every save has different bytes."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        """Return model and optimizer in the form that DCP takes, with the live tensors."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """Return this rank's own parts of all tensors."""
        values = [v for part in self.state().values() for v in part.values()]
        found = [v.detach() for v in values if isinstance(v, torch.Tensor)]
        return [t.to_local() if hasattr(t, "to_local") else t for t in found]

    def unique_bytes(self) -> int:
        """Return the bytes of the whole state, each counted once even if several ranks hold it."""
        values = [v for part in self.state().values() for v in part.values()]
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


class Image:
    """Touched memory for all of a rank's bytes: the target of copies, the source of raw writes.

    It is a memory file like a staging slot, so that both copies use the same kind of memory.
    """

    def __init__(self, tensors: list[torch.Tensor], file_bytes: int) -> None:
        """Allocate space for copies of `tensors` one after another, and at least `file_bytes`."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        handle = os.memfd_create("holdfast-bench", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, max(end, file_bytes, mmap.PAGESIZE))
            self.bytes = memoryview(mmap.mmap(handle, 0))
        finally:
            os.close(handle)
        memory = torch.frombuffer(self.bytes, dtype=torch.uint8).zero_()
        self._pairs = [
            (memory[at : at + t.nbytes].view(t.dtype).view(t.shape), t)
            for at, t in zip(starts, tensors, strict=True)
        ]

    def copy_by_torch(self) -> None:
        """Copy the tensors as torch does it, with the threads that training has."""
        for target, source in self._pairs:
            target.copy_(source)

    def copy_by_libc(self) -> None:
        """Copy the tensors with the C library's memcpy."""
        for target, source in self._pairs:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


class Memcpy:
    """The cost of a copy around an operation: each way to copy is timed before and after it.

    Each is timed once, like the operation. The best of several tries would be a limit that no
    single save can reach on a machine with varying memory speed.
    """

    def __init__(self, program: Program, image: Image) -> None:
        self._program = program
        self._ways = (image.copy_by_torch, image.copy_by_libc)
        self._tries: list[list[float]] = [[] for _ in self._ways]

    def measure(self) -> None:
        """Copy in both ways on all ranks at once."""
        for way, seconds in zip(self._ways, self._tries, strict=True):
            seconds.append(self._program.measure(way))

    @property
    def seconds(self) -> float:
        """The mean of the faster way, with the slowest rank's time of each copy."""
        return min(statistics.mean(seconds) for seconds in self._tries)


def balanced_order(count: int, row: int) -> list[int]:
    """Return the numbers from 0 to `count` - 1 in the order of pair number `row`, from 0.

    Over `count` rows (2 × `count` if it is odd), each number has each position equally often and
    directly follows each other number equally often. Changing only the first operation would not do
    this, and a write after a long write meets a slower disk. Source: E. J. Williams, "Experimental
    designs balanced for the estimation of residual effects of treatments", Australian Journal of
    Scientific Research A 2 (1949).
    """
    first = [
        (place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)
    ]
    order = [(number + row) % count for number in first]
    return order[::-1] if count % 2 and (row // count) % 2 else order
