"""The costs of a long run: a step without a save, and memory growth over many saves.

`runner` starts this with a state small enough for a hundred saves.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from pathlib import Path

import psutil

from holdfast_bench.limits.ranks import Program, Trained
from holdfast_bench.limits.saves import Saver

MICROSECONDS = 1e6


def main() -> None:
    program = Program()
    trained = Trained(program.settings["state_bytes"])
    saver = Saver(program, trained, program.directory / "endurance")
    for _ in range(program.settings["warm_up_saves"]):
        save(trained, saver)
    before = memory_of_node(program)
    for _ in range(program.settings["saves"]):
        save(trained, saver)
    after = memory_of_node(program)
    program.note(memory_growth=sum(after.values()) / sum(before.values()) - 1)
    program.facts |= {"before": before, "after": after}
    measure_steps(program, saver)
    saver.session.close()
    program.finish()


def save(trained: Trained, saver: Saver) -> None:
    """Save new bytes once. Only the newest checkpoint stays on disk."""
    trained.update()
    saver.keep_only(saver.save().directory)


def measure_steps(program: Program, saver: Saver) -> None:
    """Measure the step boundary of an empty loop, in microseconds, on the slowest rank."""
    steps = program.settings["steps"]
    session = saver.session
    spent: list[float] = []
    going = iter(session.steps(session.step + steps + 1))
    for _ in range(steps):
        began = time.perf_counter()
        next(going)
        spent.append(time.perf_counter() - began)
    program.note(step_overhead_us=program.slowest(statistics.median(spent)) * MICROSECONDS)
    rare = statistics.quantiles(spent, n=1000)[-1]
    program.note(step_overhead_p999_us=program.slowest(rare) * MICROSECONDS)


def memory_of_node(program: Program) -> dict[str, float]:
    """Return the bytes of all ranks, their flusher and the staging slots, each slot counted once.

    Memory that the C library has freed but still holds is returned to the system first. An
    optimizer's temporary buffers leave a varying few percent of it.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    flusher = flusher_of(psutil.Process()).pid if program.rank == 0 else None
    return {
        "ranks": program.together(private_bytes(psutil.Process().pid)),
        "flusher": program.together(private_bytes(flusher) if flusher else 0),
        "slots": program.together(slot_bytes(flusher) if flusher else 0),
    }


def flusher_of(parent: psutil.Process) -> psutil.Process:
    """Return the flusher that a rank has started."""
    return next(c for c in parent.children() if "holdfast.trainer.flusher" in c.cmdline())


def private_bytes(pid: int) -> int:
    """Return the resident bytes of a process without shared memory, which contains the slots."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def slot_bytes(pid: int) -> int:
    """Return the memory of the memory files that a process holds, each counted once."""
    found: dict[int, int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:" in str(link.readlink()):
            facts = link.stat()
            found[facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())


if __name__ == "__main__":
    main()
