"""A fresh program: its first save and steady ones, then a signal, up to the last commit.

Started by `conduct`, which sends the signal and watches for the commit. The limits that the
time from signal to commit is compared with are measured here too, in the same run.
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

from holdfast.trainer.bench.files import ready_pages, remove, share_out, sizes_of, write_files
from holdfast.trainer.bench.ranks import Image, Memcpy, Program, Trained
from holdfast.trainer.bench.saves import Saver

STEADY_SAVES: Final = 3
STEPS_MAX: Final = 10_000
# A fraction of what lies between two saves of any real run.
FIRST_INTERVAL_S: Final = 10.0


def main() -> None:
    program = Program()
    trained = Trained(program.settings["state_bytes"])
    saver = Saver(program, trained, program.directory / "start")
    program.note(prepare=saver.prepared)
    train_before_first_save(program, trained)
    first = saver.save()
    program.note(**{"first.blocked": first.blocked, "first.committed": first.committed})
    measure_steady(program, trained, saver)
    ends = train_until_stopped(program, saver)
    program.facts["step_ends"] = ends
    program.finish()


def train_before_first_save(program: Program, trained: Trained) -> None:
    """A short interval of steps, and then all that comes before any other save.

    The steps leave the processors alone, as those of an accelerator do.
    """
    for _ in range(math.ceil(FIRST_INTERVAL_S / program.settings["step_s"])):
        time.sleep(program.settings["step_s"])
        program.meet()
    trained.update()
    ready_pages(sum(tensor.nbytes for tensor in trained.tensors()))


def measure_steady(program: Program, trained: Trained, saver: Saver) -> None:
    """Saves after the first, each beside the limits of the same moment; pages are left ready."""
    sizes = sizes_of(saver.run.latest.resolve())
    share = share_out(sizes, program.ranks)[program.rank]
    image = Image(trained.tensors(), sum(share.values()))
    for number in range(STEADY_SAVES):
        trained.update()
        ready_pages(sum(share.values()))
        memcpy = Memcpy(program, image)
        memcpy.measure()
        done = saver.save()
        memcpy.measure()
        program.note(**{"save.blocked": done.blocked, "save.committed": done.committed})
        program.note(memcpy=memcpy.seconds)
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


def train_until_stopped(program: Program, saver: Saver) -> list[float]:
    """Steps of a known length, each ending in a collective; Unix times of their ends."""
    pids: list[int] = [0] * program.ranks
    dist.all_gather_object(pids, os.getpid())
    ends: list[float] = []
    for _ in saver.session.steps(STEPS_MAX):
        time.sleep(program.settings["step_s"])
        program.meet()
        ends.append(time.time())
        if len(ends) == 1 and program.rank == 0:
            say_ready(program.directory / "ready.json", pids)
    saver.session.close()
    return ends


def say_ready(path: Path, pids: list[int]) -> None:
    """Tell `conduct` which processes to signal."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(pids))
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
