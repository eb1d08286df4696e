"""What every rank program of the benchmark needs: acts begun together, timed, the slowest counts.

A program is started by `launch` under torchrun with its settings as one JSON argument; rank 0
leaves what was found as JSON in the file that the settings name. Times are seconds.
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
# Below this a state of wide layers would have too few of them to be like one.
SMALL_STATE_BYTES: Final = 64_000_000
ALIGNMENT: Final = 64

Seconds = dict[str, list[float]]
State = dict[str, Any]


class Program:
    """One rank of a benchmark program: its settings, its process group, what it found."""

    def __init__(self, device: str = "cpu") -> None:
        self.settings: dict[str, Any] = json.loads(sys.argv[1])
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        # Words of the benchmark's own: stock DCP saves over the default group meanwhile.
        self._group = dist.new_group(backend="gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.directory = Path(self.settings["directory"])
        self.seconds: Seconds = {}
        self.facts: dict[str, Any] = {}

    def measure(self, act: Callable[[], object]) -> float:
        """Seconds of the slowest rank for `act`, begun by all at once."""
        self.meet()
        began = time.perf_counter()
        act()
        return self.slowest(time.perf_counter() - began)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        dist.barrier(group=self._group)

    def slowest(self, seconds: float) -> float:
        """The largest of all ranks' values."""
        return self._reduced(seconds, dist.ReduceOp.MAX)

    def together(self, count: float) -> float:
        """The sum of all ranks' values."""
        return self._reduced(count, dist.ReduceOp.SUM)

    def note(self, **found: float) -> None:
        """Add one value to each named series."""
        for name, value in found.items():
            self.seconds.setdefault(name, []).append(value)

    def is_time_left(self) -> bool:
        """False once the time given to this program is used up; all ranks learn the same."""
        return self.slowest(time.time()) < float(self.settings["end_by"])

    def finish(self) -> None:
        """Leave what was found, and the group."""
        if self.rank == 0:
            found = {"seconds": self.seconds, "facts": self.facts}
            out = Path(self.settings["out"])
            temporary = out.with_suffix(".tmp")
            temporary.write_text(json.dumps(found))
            os.replace(temporary, out)
        dist.destroy_process_group()

    def _reduced(self, value: float, how: Any) -> float:
        word = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(word, op=how, group=self._group)
        return float(word)


class Trained:
    """A sharded stack of square layers with AdamW, whose training state has about `bytes`."""

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
        """One optimizer step, so that every save has other bytes than the one before."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        """Model and optimizer as DCP takes them; the tensors are the live ones."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """This rank's own parts of all tensors."""
        values = [v for part in self.state().values() for v in part.values()]
        found = [v.detach() for v in values if isinstance(v, torch.Tensor)]
        return [t.to_local() if hasattr(t, "to_local") else t for t in found]

    def unique_bytes(self) -> int:
        """Bytes of the whole state, each counted once however many ranks hold it."""
        values = [v for part in self.state().values() for v in part.values()]
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


class Image:
    """Memory for all of a rank's bytes, faulted in: where a copy goes and raw writes come from.

    A memory file, as a staging slot is, so that both copies go into memory of one kind.
    """

    def __init__(self, tensors: list[torch.Tensor], file_bytes: int) -> None:
        """Room for copies of `tensors` side by side, and for `file_bytes` at least."""
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
        """The tensors, copied as torch does it, with the threads that training has."""
        for target, source in self._pairs:
            target.copy_(source)

    def copy_by_libc(self) -> None:
        """The tensors, copied by the C library's memcpy."""
        for target, source in self._pairs:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


class Memcpy:
    """What a copy costs around an act: each way to copy is timed before it and after it.

    Once each, as the act itself is timed once: the best of several tries would be a limit that
    no single save meets on a machine whose memory is now faster and now slower.
    """

    def __init__(self, program: Program, image: Image) -> None:
        self._program = program
        self._ways = (image.copy_by_torch, image.copy_by_libc)
        self._tries: list[list[float]] = [[] for _ in self._ways]

    def measure(self) -> None:
        """Copy in both ways, all ranks at once."""
        for way, seconds in zip(self._ways, self._tries, strict=True):
            seconds.append(self._program.measure(way))

    @property
    def seconds(self) -> float:
        """The mean of the faster way, of the slowest rank each time."""
        return min(statistics.mean(seconds) for seconds in self._tries)
