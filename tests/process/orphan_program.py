"""A program whose ranks leave child processes in several ways: `orphan_program.py SETTINGS`.

They are one process in a new session, one that is forked twice so that it has no parent, and the
workers of a DataLoader. The first two ignore SIGTERM and have an empty environment, so that only
the process tree shows whose they are. All are recorded in `folder` by launch, rank and kind. A
rank of the second launch records the helpers of the first that are still alive, and ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

HELPER = ("/bin/sleep", "600")
WORKERS = 2
FIRST_LIFE_S = 600.0


def note(folder: Path, kind: str, pid: int) -> None:
    """Record the process's identity atomically."""
    words = {"pid": pid, "started_at": psutil.Process(pid).create_time()}
    name = f"{os.environ['HOLDFAST_LAUNCH']}-{os.environ['RANK']}-{kind}"
    (folder / f"{name}.tmp").write_text(json.dumps(words))
    (folder / f"{name}.tmp").rename(folder / f"{name}.json")


def become_helper(folder: Path, kind: str) -> None:
    """Never returns: this process sleeps until SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(folder, kind, os.getpid())
    os.execve(HELPER[0], list(HELPER), {})


def fork_helpers(folder: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        become_helper(folder, "setsid")
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            become_helper(folder, "daemon")
        os._exit(0)
    os.waitpid(middle, 0)


def survivors(folder: Path, launch: int) -> list[str]:
    """The helpers of a launch that still run."""
    found = []
    for path in sorted(folder.glob(f"{launch}-*.json")):
        known = json.loads(path.read_text())
        try:
            process = psutil.Process(known["pid"])
            same = process.create_time() == known["started_at"]
            if same and process.status() != psutil.STATUS_ZOMBIE:
                found.append(path.stem)
        except psutil.NoSuchProcess:
            continue
    return found


def main() -> None:
    folder = Path(json.loads(sys.argv[1])["folder"])
    launch, rank = int(os.environ["HOLDFAST_LAUNCH"]), os.environ["RANK"]
    left = survivors(folder, launch - 1)
    (folder / f"left-{launch}-{rank}.txt").write_text("\n".join(left))
    fork_helpers(folder)

    from torch.utils.data import DataLoader

    samples = list(range(1000))
    batches = iter(DataLoader(samples, num_workers=WORKERS))  # type: ignore[arg-type]
    next(batches)
    me = psutil.Process()
    for number, worker in enumerate(p for p in me.children() if p.name() != "sleep"):
        note(folder, f"worker{number}", worker.pid)
    note(folder, "rank", me.pid)
    if launch == 1:
        time.sleep(FIRST_LIFE_S)


if __name__ == "__main__":
    main()
