"""Hangs of real torchruns with gloo: how each is produced, and which ranks are to blame.

A capture has the flight record of each rank, and the summaries of their stacks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil
from tests.endings.crashes import PROGRAMS
from tests.endings.records import CHECKOUT, FOLDER

from holdfast.workers.agent.watch.stack_text import RankStack
from holdfast.workers.agent.watch.stacks import StackTarget, take_stack

HANGS_FOLDER: Final = FOLDER / "hangs"
PREFIX: Final = "gloo-rank-"
STACKS: Final = "stacks.json"
WAIT_S: Final = 120.0
POLL_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang of `ranks` ranks, of which `silent` cannot write a record. `culprits` caused it.

    `quotes` are texts that the finding from the records must contain: the ranks, the collective
    and the line of the program. They are empty if gloo records nothing about the hang.
    """

    name: str
    ranks: int
    culprits: tuple[int, ...]
    quotes: tuple[str, ...]
    silent: int = 0


HANGS: Final = (
    Hang(
        name="asleep",
        ranks=4,
        culprits=(2,),
        quotes=(
            "rank 2 is missing in all_reduce 3 of default_pg (0)",
            "the last call is all_reduce 2 at train (programs/hangs.py:34)",
            "ranks 0, 1, 3 wait at asleep (programs/hangs.py:46)",
        ),
    ),
    Hang(
        name="asleep_from_the_start",
        ranks=3,
        culprits=(1,),
        quotes=(
            "rank 1 is missing in all_reduce 1 of default_pg (0)",
            "its record has no call",
            "ranks 0, 2 wait at asleep_from_the_start (programs/hangs.py:53)",
        ),
    ),
    Hang(
        name="stopped",
        ranks=4,
        silent=1,
        culprits=(3,),
        quotes=(
            "rank 3 is missing in all_reduce 3 of default_pg (0) (no flight record)",
            "ranks 0, 1, 2 wait at stopped (programs/hangs.py:61)",
        ),
    ),
    Hang(
        name="skipped",
        ranks=3,
        culprits=(1,),
        quotes=(
            "rank 1 calls barrier 3 of no size at skipped (programs/hangs.py:69)",
            "ranks 0, 2 call all_reduce 3 of 4 Float at skipped (programs/hangs.py:68)",
        ),
    ),
    # Ranks 0 and 2 finish their calls, and are in other code when rank 1 waits.
    Hang(
        name="other_shape",
        ranks=3,
        culprits=(1,),
        quotes=(
            "rank 1 calls all_reduce 3 of 5 Float at other_shape (programs/hangs.py:76)",
            "ranks 0, 2 call all_reduce 3 of 4 Float",
        ),
    ),
    Hang(
        name="opposite_orders",
        ranks=2,
        culprits=(),
        quotes=(
            "rank 0 waits in all_reduce 1 of group 1 at opposite_orders (programs/hangs.py:84)",
            "rank 1 waits in all_reduce 1 of group 2 at opposite_orders (programs/hangs.py:84)",
        ),
    ),
    # Ranks 0 and 1 wait for rank 2 as well, which waits for rank 3 in a group of the two.
    Hang(
        name="member_asleep",
        ranks=4,
        culprits=(3,),
        quotes=(
            "rank 3 is missing in all_reduce 3 of default_pg (0)",
            "ranks 0, 1 wait at member_asleep (programs/hangs.py:95)",
        ),
    ),
    # gloo does not record sends and receives.
    Hang(name="no_send", ranks=2, culprits=(1,), quotes=()),
)


def capture_hang(hang: Hang, into: Path) -> Path:
    """Run a hang, and keep its flight records and stacks in a folder of `into`."""
    with tempfile.TemporaryDirectory(prefix="hang-") as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={hang.ranks}", "hangs.py", hang.name, scratch]
        launched = subprocess.Popen(
            command,
            cwd=PROGRAMS,
            env={**os.environ, "TORCH_FR_BUFFER_SIZE": "20", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        ranks: dict[int, psutil.Process] = {}
        try:
            _wait_for_records(folder, hang.ranks - hang.silent, launched)
            ranks = _ranks_of(launched.pid)
            stacks = [take_stack(StackTarget(rank=r, pid=p.pid)) for r, p in sorted(ranks.items())]
            return _keep(hang, folder, [stack for stack, _ in stacks], into)
        finally:
            # The ranks first: torchrun gives each a separate session.
            for process in ranks.values():
                process.kill()
            os.killpg(launched.pid, signal.SIGKILL)
            launched.wait()


def _wait_for_records(folder: Path, count: int, launched: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + WAIT_S
    while len(list(folder.glob(f"{PREFIX}*"))) < count:
        if time.monotonic() > give_up or launched.poll() is not None:
            raise TimeoutError(f"no flight records; torchrun: {launched.poll()}")
        time.sleep(POLL_S)


def _ranks_of(pid: int) -> dict[int, psutil.Process]:
    return {int(one.environ()["RANK"]): one for one in psutil.Process(pid).children()}


def _keep(hang: Hang, records: Path, stacks: list[RankStack], into: Path) -> Path:
    """Write the capture without the paths of this machine, which may be secret."""
    folder = into / hang.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in records.glob(f"{PREFIX}*"):
        (folder / path.name).write_bytes(_without_paths(path.read_bytes()))
    facts: list[dict[str, Any]] = [
        {"rank": one.rank, "top": one.top, "place": one.place, "waits": one.waits} for one in stacks
    ]
    (folder / STACKS).write_text(json.dumps(facts, indent=1) + "\n")
    return folder


def _without_paths(record: bytes) -> bytes:
    """Return a record with other folders of the same length, because a pickle has lengths."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    given = (CHECKOUT, Path(sys.base_prefix), Path(torch.origin).parents[1])
    paths = {str(one) for path in given for one in (path, path.resolve())}
    for path in sorted(paths, key=len, reverse=True):
        other = ("/" + "python" * len(path))[: len(path)]
        record = record.replace(path.encode(), other.encode())
    return record


def read_stacks(folder: Path) -> list[RankStack]:
    """Return the captured stacks of a hang."""
    found = json.loads((folder / STACKS).read_text())
    return [RankStack(**{**one, "top": tuple(one["top"])}) for one in found]
