"""One rank of the benchmark: saves by a session, beside this machine's own memcpy and writes.

Started by `benchmarks/run.py` under torchrun. All ranks do each thing at once, and the slowest
counts; rank 0 prints one line of JSON. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.trainer import Session

REPEATS = 5
WIDTH = 1024
COMMIT_TIMEOUT_S = 120.0
POLL_S = 0.001
WRITE_BYTES = 16 * 1024 * 1024
# Parameters and AdamW's two moments, all of them 32-bit floats.
BYTES_PER_PARAMETER = 3 * 4


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    model, optimizer = build(options.state_bytes)
    update(model, optimizer)
    session = Session(model, optimizer, directory=options.directory / "run", interval=1_000_000)
    mine = local_state(model, optimizer)
    acts = {"memcpy": copier(mine), "raw_write": writer(mine, options.directory)}
    seconds, manifest = measure_saves(session, lambda: update(model, optimizer), acts)
    session.close()
    if dist.get_rank() == 0:
        print(json.dumps(summarise(seconds, manifest)), flush=True)
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--state-bytes", type=int, required=True, help="of all ranks together")
    return parser.parse_args()


def build(state_bytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A sharded stack of square layers whose training state has about `state_bytes`."""
    count = max(1, round(state_bytes / (WIDTH * WIDTH * BYTES_PER_PARAMETER)))
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]
    model = torch.nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step, so that every save has other bytes than the one before."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def local_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's own shards of parameters and moments."""
    tensors = list(model.parameters())
    for values in optimizer.state.values():
        tensors += [value for value in values.values() if value.dim() > 0]
    return [getattr(tensor.detach(), "_local_tensor", tensor.detach()) for tensor in tensors]


def measure(act: Callable[[], None]) -> float:
    """Seconds of the slowest rank for `act`, begun by all at once."""
    dist.barrier()
    began = time.perf_counter()
    act()
    return slowest(time.perf_counter() - began)


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def copier(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Copy the rank's state into memory that is there already."""
    targets = [torch.empty_like(tensor).zero_() for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    return copy


def writer(tensors: list[torch.Tensor], directory: Path) -> Callable[[], None]:
    """Write the rank's state into one new file, in large writes, and fsync it."""
    total = sum(tensor.nbytes for tensor in tensors)
    image = memoryview(bytes(total))
    numbers = itertools.count()

    def write() -> None:
        # A new file each time, as a checkpoint has; removing one is not a part of writing it.
        path = directory / f"raw-{dist.get_rank()}-{next(numbers)}"
        with open(path, "wb", buffering=0) as stream:
            for start in range(0, total, WRITE_BYTES):
                stream.write(image[start : start + WRITE_BYTES])
            os.fsync(stream.fileno())

    return write


def measure_saves(
    session: Session, train: Callable[[], None], acts: dict[str, Callable[[], None]]
) -> tuple[dict[str, list[float]], Manifest]:
    """Seconds of each act, of each save's hold on the slowest rank, and until each commit.

    The boundary between two steps is what the loop waits for. The machine's own limits are
    measured again before every save, so that a busy moment meets both alike. Also returns the
    last manifest.
    """
    seconds: dict[str, list[float]] = {"save_blocked": [], "save_committed": []}
    seconds |= {name: [] for name in acts}
    steps = iter(session.steps(REPEATS + 2))
    step: int | None = next(steps)
    while step is not None:
        train()
        for name, act in acts.items():
            seconds[name].append(measure(act))
        session.checkpoint()
        dist.barrier()
        began = time.perf_counter()
        following = next(steps, None)
        held = slowest(time.perf_counter() - began)
        manifest = wait_for_commit(session.run_directory, step)
        durable = slowest(time.perf_counter() - began)
        # The last boundary ends the session and waits for the commit: no save like the others.
        if following is not None:
            seconds["save_blocked"].append(held)
            seconds["save_committed"].append(durable)
        step = following
    return seconds, manifest


def wait_for_commit(run: Path, step: int) -> Manifest:
    """The manifest of `step`; `TimeoutError` when it is not there in time."""
    give_up = time.monotonic() + COMMIT_TIMEOUT_S
    while time.monotonic() < give_up:
        for directory in run.glob(f"checkpoints/step-{step:08d}.*"):
            if manifest := read_manifest(directory):
                return manifest
        time.sleep(POLL_S)
    raise TimeoutError(f"step {step} was not committed within {COMMIT_TIMEOUT_S:.0f} s")


def summarise(seconds: dict[str, list[float]], manifest: Manifest) -> dict[str, object]:
    """Medians without each thing's first time, and ratios that mean the same on every machine."""
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    median["first_save_blocked"] = seconds["save_blocked"][0]
    return {
        "ranks": manifest.world_size,
        "bytes": manifest.bytes,
        "seconds": {name: round(value, 4) for name, value in median.items()},
        "ratios": {
            "save_blocked": round(median["save_blocked"] / median["memcpy"], 2),
            "first_save": round(median["first_save_blocked"] / median["memcpy"], 2),
            "save_committed": round(median["save_committed"] / median["raw_write"], 2),
        },
    }


if __name__ == "__main__":
    main()
