"""What a long run adds up to: the cost of a step without a save, and memory over many saves.

Started by `conduct`, with a state small enough for a hundred saves.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from pathlib import Path

import psutil

from holdfast.trainer.bench.ranks import Program, Trained
from holdfast.trainer.bench.saves import Saver

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
    """One save of new bytes; only the newest checkpoint stays on disk."""
    trained.update()
    saver.keep_only(saver.save().directory)


def measure_steps(program: Program, saver: Saver) -> None:
    """The median boundary of a loop that does nothing else, in microseconds, slowest rank."""
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
    """Bytes that all ranks, their flusher and the staging slots hold, each slot counted once.

    What the C library has been given back and keeps for later is let go first: an optimizer's
    passing buffers leave some percent of it behind, now more and now less.
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
    """The flusher that a rank has started."""
    return next(c for c in parent.children() if "holdfast.trainer.flusher" in c.cmdline())


def private_bytes(pid: int) -> int:
    """Resident bytes of a process without those in shared memory, where the slots lie."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def slot_bytes(pid: int) -> int:
    """Memory in the memory files that a process holds, each counted once."""
    found: dict[int, int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:" in str(link.readlink()):
            facts = link.stat()
            found[facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())


if __name__ == "__main__":
    main()
