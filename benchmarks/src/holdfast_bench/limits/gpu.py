"""The benchmark for a state on GPUs: how long a save blocks, and steps while a flush runs.

`runner` starts this on machines with GPUs, with one rank for each GPU.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from holdfast_bench.limits.commits import newest_durable
from holdfast_bench.limits.ranks import Program, Trained
from holdfast_bench.limits.saves import Saver

MATRIX_WIDTH: Final = 8192
PRODUCTS_OF_STEP: Final = 16
BASELINE_STEPS: Final = 50
FLUSH_STEPS_MAX: Final = 20_000


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    program = Program("cuda")
    trained = Trained(program.settings["state_bytes"], "cuda")
    saver = Saver(program, trained, program.directory / "gpu")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = saver.save()
    program.facts |= {
        "device_bytes_of_a_save": program.slowest(torch.cuda.max_memory_allocated() - before),
        "context_bytes": program.slowest(context_bytes()),
    }
    program.note(**{"first.blocked": first.blocked})
    copy = pinned_copier(trained.tensors())
    step = step_maker()
    for _ in range(program.settings["pairs"]):
        trained.update()
        torch.cuda.synchronize()
        program.note(pinned_copy=program.measure(copy))
        program.note(step_baseline=median_step(step, lambda done: done < BASELINE_STEPS))
        measure_save(program, saver, step)
    program.facts |= {"unique_bytes": trained.unique_bytes()}
    program.facts |= {"device": torch.cuda.get_device_name()}
    saver.session.close()
    program.finish()


def context_bytes() -> int:
    """Return the bytes of this rank's device that are in use outside torch's allocator.

    If this is more than one context's size on a node with several ranks, another rank has opened a
    context on this device.
    """
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measure_save(program: Program, saver: Saver, step: Callable[[], None]) -> None:
    """Save, and measure the median step while the flush runs, to compare with the baseline."""
    saver.session.checkpoint()
    program.meet()
    began = time.perf_counter()
    saver.session.boundary()
    program.note(**{"save.blocked": program.slowest(time.perf_counter() - began)})
    number = saver.session.step

    def is_flushing(done: int) -> bool:
        return done < FLUSH_STEPS_MAX and newest_durable(saver.run) < number

    program.note(step_during_flush=median_step(step, is_flushing))
    program.meet()
    saver.keep_only(saver.run.latest.resolve())


def pinned_copier(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Return a function that copies all tensors to page-locked memory and waits for the end."""
    targets = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]

    def copy() -> None:
        for target, source in zip(targets, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return copy


def step_maker() -> Callable[[], None]:
    """Return a function that runs and waits for matrix products that take as long as a step."""
    matrix = torch.randn(MATRIX_WIDTH, MATRIX_WIDTH, device="cuda", dtype=torch.bfloat16)
    # So their products remain finite.
    matrix /= MATRIX_WIDTH**0.5

    def step() -> None:
        product = matrix
        for _ in range(PRODUCTS_OF_STEP):
            product = matrix @ product
        torch.cuda.synchronize()

    return step


def median_step(step: Callable[[], None], goes_on: Callable[[int], bool]) -> float:
    """Return the median seconds of a step. Runs at least one step, then while `goes_on(done)`."""
    spent: list[float] = []
    while not spent or goes_on(len(spent)):
        began = time.perf_counter()
        step()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


if __name__ == "__main__":
    main()
