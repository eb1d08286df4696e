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
from holdfast.trainer.bench.saves import Save, Saver

STEADY_SAVES: Final = 3
STEPS_MAX: Final = 10_000
# A fraction of what lies between two saves of any real run.
FIRST_INTERVAL_S: Final = 10.0
# Room for a rank's share of the files, which are larger than its tensors by their headers.
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
    """A short interval of steps, which leave the processors alone, as an accelerator's do."""
    for _ in range(math.ceil(FIRST_INTERVAL_S / program.settings["step_s"])):
        time.sleep(program.settings["step_s"])
        program.meet()


def save_beside_copies(
    program: Program, trained: Trained, saver: Saver, image: Image
) -> tuple[Save, float]:
    """A save, and the seconds of a plain copy of the same tensors right before and after it.

    The first save and the steady ones are made in this one way, so that what differs is theirs.
    """
    trained.update()
    ready_pages(tensor_bytes(trained))
    memcpy = Memcpy(program, image)
    memcpy.measure()
    saved = saver.save()
    memcpy.measure()
    return saved, memcpy.seconds


def measure_steady(program: Program, trained: Trained, saver: Saver, image: Image) -> None:
    """Saves after the first, each beside the limits of the same moment; pages are left ready."""
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
    """What this rank's tensors take."""
    return sum(tensor.nbytes for tensor in trained.tensors())


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
