"""A fresh program: its first save, steady saves, then a signal and the last commit.

`runner` starts this, sends the signal and waits for the commit. This program also measures the
limits that the time from signal to commit is compared with, in the same run.
"""

from __future__ import annotations

import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Final

import torch.distributed as dist

from holdfast_bench.limits.files import ready_pages, remove, share_out, sizes_of, write_files
from holdfast_bench.limits.ranks import Image, Memcpy, Program, Trained
from holdfast_bench.limits.saves import Save, Saver

STEADY_SAVES: Final = 3
STEPS_MAX: Final = 10_000
# Much less than the time between two saves of a real run.
FIRST_INTERVAL_S: Final = 10.0
# Space for a rank's share of the files, which exceed its tensors by their headers.
FILES_PER_TENSORS: Final = 1.25


def main() -> None:
    program = Program()
    trained = Trained(program.settings["state_bytes"])
    saver = Saver(program, trained, program.directory / "start")
    program.note(prepare=saver.prepared)
    image = Image(trained.tensors(), round(tensor_bytes(trained) * FILES_PER_TENSORS))
    train_before_first_save(program)
    first, copied = save_beside_copies(program, trained, saver, image)
    program.note(**{"first.blocked": first.blocked, "first.committed": first.committed})
    program.note(**{"first.memcpy": copied})
    measure_steady(program, trained, saver, image)
    ends = train_until_stopped(program, saver)
    program.facts["step_ends"] = ends
    program.finish()


def train_before_first_save(program: Program) -> None:
    """Run steps for a short interval. They leave the CPU idle, as steps on an accelerator do."""
    for _ in range(math.ceil(FIRST_INTERVAL_S / program.settings["step_s"])):
        time.sleep(program.settings["step_s"])
        program.meet()


def save_beside_copies(
    program: Program, trained: Trained, saver: Saver, image: Image
) -> tuple[Save, float]:
    """Save, and return the seconds of a plain copy of the same tensors just before and after.

    The first save and the steady saves use this same function, which makes them comparable.
    """
    trained.update()
    ready_pages(tensor_bytes(trained))
    memcpy = Memcpy(program, image)
    memcpy.measure()
    saved = saver.save()
    memcpy.measure()
    return saved, memcpy.seconds


def measure_steady(program: Program, trained: Trained, saver: Saver, image: Image) -> None:
    """Save after the first save, measure the limits next to each save, and leave pages ready."""
    sizes = sizes_of(saver.run.latest.resolve())
    share = share_out(sizes, program.ranks)[program.rank]
    for number in range(STEADY_SAVES):
        done, copied = save_beside_copies(program, trained, saver, image)
        program.note(**{"save.blocked": done.blocked, "save.committed": done.committed})
        program.note(memcpy=copied)
        raw = program.directory / f"raw-{number}"
        if program.rank == 0:
            raw.mkdir()
        ready_pages(sum(share.values()))
        program.note(raw_write=program.measure(partial(write_files, raw, share, image.bytes)))
        program.meet()
        if program.rank == 0:
            remove(raw)
        saver.keep_only(done.directory)
    ready_pages(sum(share.values()))


def tensor_bytes(trained: Trained) -> int:
    """Return the bytes of this rank's tensors."""
    return sum(tensor.nbytes for tensor in trained.tensors())


def train_until_stopped(program: Program, saver: Saver) -> list[float]:
    """Run steps of a known length, each with a collective. Return the Unix times of their ends."""
    pids: list[int] = [0] * program.ranks
    dist.all_gather_object(pids, os.getpid())
    ends: list[float] = []
    for _ in saver.session.steps(STEPS_MAX):
        time.sleep(program.settings["step_s"])
        program.meet()
        ends.append(time.time())
        if len(ends) == 1 and program.rank == 0:
            write_ready(program.directory / "ready.json", pids)
    saver.session.close()
    return ends


def write_ready(path: Path, pids: list[int]) -> None:
    """Write the processes that `runner` is to signal."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(pids))
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
