"""The global batch of a run: the same at every number of ranks.

A trainer's arguments give the batch per device. The first launch of a run notes how many ranks
shared it, in `transformers.json` in the run's folder. A later launch on other ranks changes the
batch per device and the gradient accumulation so that the global batch stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from holdfast.contracts import environment as names
from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes
from holdfast.contracts.errors import PreflightError
from holdfast.contracts.node.reporting import report
from holdfast.contracts.plain_text import counted
from holdfast.trainer.data.order import local_batch, micro_parts
from holdfast.trainer.process.program import program_stem
from holdfast.trainer.ranks.collective import attempt
from holdfast.trainer.ranks.rank_context import choose_directory

FILE: Final = "transformers.json"


@dataclass(frozen=True, kw_only=True)
class GivenBatch:
    """The arguments of a program, and the number of ranks that first ran with them."""

    per_device: int
    accumulation: int
    world_size: int

    @property
    def total(self) -> int:
        """The global batch: the samples of one optimizer step on all ranks."""
        return self.per_device * self.accumulation * self.world_size

    def shared_by(self, world_size: int) -> GivenBatch:
        """Return the batch per device and the accumulation of as many ranks.

        The batch per device never grows, because it may not fit into the device's memory. Raises
        `SpecError` if the ranks cannot share the global batch evenly.
        """
        share = local_batch(self.total, world_size)
        parts = micro_parts(share, self.per_device)
        if world_size == self.world_size:
            return self
        return GivenBatch(per_device=share // parts, accumulation=parts, world_size=world_size)


def run_folder(directory: str | Path | None, env: Mapping[str, str]) -> Path:
    """Return the run's folder, as the session will choose it."""
    if env.get(names.RANK_STATUS) and env.get(names.RUN_DIRECTORY):
        return Path(env[names.RUN_DIRECTORY])
    return choose_directory(directory, env, program_stem())


def agree_on_batch(given: GivenBatch, folder: Path) -> GivenBatch:
    """Return the batch of this launch. All ranks call this together.

    Other arguments than the first launch had are the program's own wish and count from now on.
    Raises `SpecError` if the ranks cannot share the global batch evenly, and `PreflightError` if
    rank 0 cannot read or write the record.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    shared: list[Any] = [None]
    if is_first:
        found, error = attempt(lambda: _recorded(given, folder))
        shared = [(found, str(error or ""))]
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    recorded, problem = shared[0]
    if problem:
        raise PreflightError(f"{folder / FILE}: {problem}. Make the folder writable, or delete it")
    first = GivenBatch(**recorded)
    batch = first.shared_by(given.world_size)
    if batch != given and is_first:
        report(
            f"holdfast: the run began on {counted(first.world_size, 'rank')} with a global "
            f"batch of "
            f"{first.total}; on {counted(given.world_size, 'rank')} this is "
            f"per_device_train_batch_size="
            f"{batch.per_device} and gradient_accumulation_steps={batch.accumulation}"
        )
    return batch


def _recorded(given: GivenBatch, folder: Path) -> Any:
    """Return the run's record, written now if there is none or if the arguments changed."""
    path = folder / FILE
    if path.exists():
        found = json.loads(path.read_bytes())
        if (found["per_device"], found["accumulation"]) == (given.per_device, given.accumulation):
            return found
        report(
            f"holdfast: the batch is now {given.per_device} per device times {given.accumulation}, "
            f"and was {found['per_device']} times {found['accumulation']}; samples may repeat or "
            "be skipped"
        )
    make_directory(folder)
    write_bytes(path, to_json(asdict(given)))
    return asdict(given)
